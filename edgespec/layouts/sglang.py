"""SpecForge's layout, which SGLang serves: SafeAILab's, and the aux layers as layer outputs."""

from __future__ import annotations

from edgespec.layouts.draft import Draft, Layout, Written
from edgespec.layouts.eagle import eagle3_keys, midlayer
from edgespec.methods import eagle3

NAME = "sglang"


def of_eagle3(draft: Draft) -> Written:
    """LlamaForCausalLMEagle3 with `midlayer`."""
    section = {
        "eagle_aux_hidden_state_layer_ids": draft.outputs,
        "use_aux_hidden_state": True,
    }
    keys = eagle3_keys(draft, NAME) | {"eagle_config": section}
    return Written(keys, midlayer(draft), draft.maps(used=True))


LAYOUT = Layout(readers="SGLang, SpecForge", methods={eagle3.NAME: of_eagle3})
