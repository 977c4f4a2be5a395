"""What an engine of this backend says of its kernels in its config.json.

Knows the keys. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.backends.engine_config import SETTINGS, EngineConfig, EngineFields
from edgespec.backends.ort.contract import CACHE_TYPES, CacheType
from edgespec.backends.ort.head_form import HeadForm
from edgespec.backends.ort.options import KERNELS, Kernels, WeightFormat

KEYS = ("kernels", "kv_cache_dtype", "head")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Whose operators an engine's graph has, the type of the cache that our own attention reads,
    and the form of an lm_head that searches its logits; None: it is not used."""

    kernels: Kernels = "onnxruntime"
    tree_cache: CacheType | None = None
    head: HeadForm | None = None

    @classmethod
    def of(cls, options: WeightFormat, *, cached: bool, low_bit: bool = False) -> EngineSettings:
        """The settings of what is built with these options; `cached`: whether it has a KV cache,
        `low_bit`: whether it has weights that our own kernel reads."""
        if options.kernels == "native" and cached:
            return cls("native", CACHE_TYPES[options.kv_cache_dtype])
        return cls("native") if low_bit else cls()

    @property
    def head_width(self) -> int:
        """The width of the rows that such an lm_head multiplies; 0 where there is none."""
        return 0 if self.head is None else self.head.layout.in_features

    @property
    def cache(self) -> CacheType:
        """The type of the KV cache, where there is one."""
        return self.tree_cache or "float32"

    @classmethod
    def read(cls, raw: Mapping[str, Any], source: str) -> EngineSettings:
        """The settings of the keys of `backend_config`; an engine without them has ONNX Runtime's
        own kernels. BundleError names a wrong key of `source`."""
        fields = EngineFields(raw, f"{source} ({SETTINGS})")
        for key in raw:
            if key not in KEYS:
                raise fields.wrong(key, f"one of {', '.join(KEYS)}")
        if not raw:
            return cls()
        kernels, dtype = fields.required_text("kernels"), fields.text("kv_cache_dtype")
        if kernels not in KERNELS:
            raise fields.wrong("kernels", f"one of {', '.join(KERNELS)}")
        if dtype is not None and dtype not in CACHE_TYPES:
            raise fields.wrong("kv_cache_dtype", f"one of {', '.join(CACHE_TYPES)}")
        if kernels != "native":
            return cls()
        return cls(
            "native",
            None if dtype is None else CACHE_TYPES[dtype],
            fields.optional("head", lambda key: HeadForm.read(fields.section(key))),
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of `backend_config`; none where all kernels are ONNX Runtime's."""
        if self.kernels == "onnxruntime":
            return {}
        names = {kept: name for name, kept in CACHE_TYPES.items()}
        cache = {} if self.tree_cache is None else {"kv_cache_dtype": names[self.tree_cache]}
        head = {} if self.head is None else {"head": self.head.to_dict()}
        return {"kernels": self.kernels, **cache, **head}


def settings_of(config: EngineConfig) -> EngineSettings:
    """The settings of a built engine. BundleError names a wrong key."""
    return EngineSettings.read(config.settings, config.component.model)
