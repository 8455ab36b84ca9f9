"""Pytest plugin: `megatrain.Trainer` replaces `transformers.Trainer`, and `Seq2SeqTrainer` streams its model too."""

from __future__ import annotations

import sys

from transformers.trainer_seq2seq import Seq2SeqTrainer

import megatrain as mt


class StreamedSeq2SeqTrainer(mt.MegaMixin, Seq2SeqTrainer):
    """The subclass that a user would write."""


trainer = mt.Trainer
# transformers replaces its own module while its parts are imported; tests import from the module that is present now.
sys.modules["transformers"].Trainer = trainer
sys.modules["transformers"].Seq2SeqTrainer = StreamedSeq2SeqTrainer

from transformers import Seq2SeqTrainer as Found  # noqa: E402
from transformers import Trainer as FoundTrainer  # noqa: E402

assert (FoundTrainer, Found) == (trainer, StreamedSeq2SeqTrainer)
