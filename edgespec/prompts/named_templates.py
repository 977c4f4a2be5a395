"""Chat templates by name, for models that come without one.

Each is the published form of a family's prompts, in Jinja as transformers runs it. Knows texts
alone.
"""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA_3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{ message.content | trim }}{{ '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)

# No role for a system prompt: it stands before the first user's text.
GEMMA = (
    "{{ bos_token }}"
    "{% set before = namespace(text='') %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}"
    "{% set before.text = message.content | trim + '\n\n' %}"
    "{% else %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{{ before.text + message.content | trim + '<end_of_turn>\n' }}"
    "{% set before.text = '' %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

PHI_3 = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

ZEPHYR = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>\n' + message.content }}{{ eos_token }}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# As FastChat writes Vicuna's prompts from version 1.1 on
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives"
    " helpful, detailed, and polite answers to the user\\'s questions."
)
VICUNA = (
    "{{ bos_token }}"
    "{% if not messages or messages[0].role != 'system' %}"
    "{{ '" + VICUNA_SYSTEM + " ' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content + ' ' }}"
    "{% elif message.role == 'user' %}{{ 'USER: ' + message.content + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

# As Meta's own code writes Llama-2's: the system prompt stands inside the first user's text
LLAMA_2 = (
    "{% set before = namespace(text='') %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}"
    "{% set before.text = '<<SYS>>\n' + message.content + '\n<</SYS>>\n\n' %}"
    "{% elif message.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (before.text + message.content) | trim + ' [/INST]' }}"
    "{% set before.text = '' %}"
    "{% else %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)

ALPACA = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content + '\n\n' }}"
    "{% elif message.role == 'user' %}{{ '### Instruction:\n' + message.content + '\n\n' }}"
    "{% else %}{{ '### Response:\n' + message.content + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)

NAMED_TEMPLATES = {
    "chatml": CHATML,
    "llama-3": LLAMA_3,
    "gemma": GEMMA,
    "phi-3": PHI_3,
    "zephyr": ZEPHYR,
    "vicuna": VICUNA,
    "llama-2": LLAMA_2,
    "alpaca": ALPACA,
}
