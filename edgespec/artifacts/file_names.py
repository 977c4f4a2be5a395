"""File names of exports, engines and quantized checkpoints."""

from __future__ import annotations

MANIFEST = "manifest.json"
MODEL = "model.onnx"
MODEL_DATA = "model.onnx.data"
CONFIG = "config.json"
GGUF_NOTE = "gguf.json"  # which file a directory stands for
EMBEDDING = "embedding.safetensors"
D2T = "d2t.safetensors"
HEADS = "draft_heads.safetensors"
GOLDEN = "golden.safetensors"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "processed_chat_template.json",
    "generation_config.json",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")  # of images
EXPORT_FILES = (MODEL, MODEL_DATA, CONFIG, EMBEDDING, D2T, HEADS, GOLDEN, *TOKENIZER_FILES)
