"""A pytest plugin: `transformers.Trainer` is `megatrain.Trainer`, and `Seq2SeqTrainer` streams its model too."""

from __future__ import annotations

import sys

from transformers.trainer_seq2seq import Seq2SeqTrainer

import megatrain as mt


class StreamedSeq2SeqTrainer(mt.MegaMixin, Seq2SeqTrainer):
    """As a user would write it."""


trainer = mt.Trainer
# transformers replaces its own module while its parts are imported: what is there now is what tests import from.
sys.modules["transformers"].Trainer = trainer
sys.modules["transformers"].Seq2SeqTrainer = StreamedSeq2SeqTrainer

from transformers import Seq2SeqTrainer as Found  # noqa: E402
from transformers import Trainer as FoundTrainer  # noqa: E402

assert (FoundTrainer, Found) == (trainer, StreamedSeq2SeqTrainer)
