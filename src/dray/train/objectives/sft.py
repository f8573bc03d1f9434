"""Supervised fine-tuning: causal, on conversations; only the assistant's messages are labels."""

from __future__ import annotations

from dray.train.data.encoding import Encoding, conversation_encoder
from dray.train.objectives.causal import Causal


class Sft(Causal):
    """The encoder marks what an assistant says."""

    learned = "the assistant's messages of conversations"
    marked = True
    conversations = True
    encoding = Encoding("sft", conversation_encoder)


OBJECTIVE = Sft
