"""Toy checkpoints in the formats that are found on disk: base models, EAGLE-3 and block drafts,
tokenizers.

Knows how published checkpoints spell their configurations and name their tensors, and writes
small random ones. Knows nothing of edgespec: what it writes is what edgespec is tested on.
"""

from tests.toys.base import Family, load_base, make_base, make_qwen3_5
from tests.toys.block_drafts import DSparkLayout, MarkovKind, make_dspark, make_jetspec
from tests.toys.dflash import Layout, make_dflash
from tests.toys.draft import DraftLayout, make_draft
from tests.toys.eagle1 import Eagle1Layout, make_eagle1
from tests.toys.experts import make_qwen3_moe
from tests.toys.families import make_gemma3, make_phi3
from tests.toys.files import Dtype, RopeSpelling, write_pickle
from tests.toys.medusa import MedusaLayout, make_medusa
from tests.toys.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, make_sentencepiece
from tests.toys.vl import VlForm, load_vl, make_qwen2_5_vl, make_qwen3_vl

__all__ = [
    "CHAT_TEMPLATE",
    "SPECIAL_TOKENS",
    "DSparkLayout",
    "DraftLayout",
    "Dtype",
    "Eagle1Layout",
    "Family",
    "Layout",
    "MarkovKind",
    "MedusaLayout",
    "RopeSpelling",
    "VlForm",
    "load_base",
    "load_vl",
    "make_base",
    "make_dflash",
    "make_draft",
    "make_dspark",
    "make_eagle1",
    "make_gemma3",
    "make_jetspec",
    "make_medusa",
    "make_phi3",
    "make_qwen2_5_vl",
    "make_qwen3_5",
    "make_qwen3_moe",
    "make_qwen3_vl",
    "make_sentencepiece",
    "write_pickle",
]
