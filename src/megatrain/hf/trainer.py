"""`megatrain.Trainer`: `transformers.Trainer` on a streamed model, with data prepared where none was."""

from __future__ import annotations

from typing import Any

import transformers

from megatrain.hf.data import prepare
from megatrain.hf.mixin import MegaMixin


class Trainer(MegaMixin, transformers.Trainer):
    """Takes what `transformers.Trainer` takes.

    Without a collator, datasets of `text`, `messages`, `prompt` + `completion` or bare `input_ids` are tokenized and
    collated for causal language modelling (hf/data.py); with one, everything is passed through.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        if data_collator is None and model is not None:
            train_dataset, for_training = prepare(train_dataset, model, processing_class)
            eval_dataset, for_evaluation = prepare(eval_dataset, model, processing_class)
            data_collator = for_training or for_evaluation
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
