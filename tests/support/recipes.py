"""The rows of the pages of recipes: for each section the published configuration, the full shape, and what the
vendor's files say besides: special tokens with their ids in the shrunk vocabulary, a template in the vendor's style.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

QWEN = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- set ns = namespace(found=false, last=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if not ns.found and message.role == 'user' %}{%- set ns.found = true %}{%- set ns.last = index %}{%- endif %}"
    "{%- endfor %}{%- for message in messages %}{%- if message.role == 'user' or (message.role == 'system' and not "
    "loop.first) %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set content = message.content %}"
    "{%- if message.reasoning_content is defined and message.reasoning_content is not none %}{{- 'kept' }}"
    "{%- elif '</think>' in content and loop.index0 < ns.last %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%Y') %}{%- else %}{%- set date_string = '2024' %}{%- endif %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nYear: ' + date_string + '\\n\\n' + system_message }}"
    "{{- '<|eot_id|>' }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set first = messages[0]['content'] + '\\n\\n' -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set loop_messages = messages -%}"
    "{%- endif -%}{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Roles have to alternate') }}{%- endif -%}"
    "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}"
    "{%- set role = message['role'] -%}{%- endif -%}"
    "{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}{{ '<end_of_turn>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)
SMOLLM = (
    "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}"
    "{%- if messages[0].role == 'system' -%}{%- set system_message = messages[0].content -%}"
    "{%- if '/no_think' in system_message -%}{%- set mode = '/no_think' -%}{%- else -%}{%- set mode = '/think' -%}"
    "{%- endif -%}{%- set custom = system_message.replace('/no_think', '').rstrip() -%}{%- else -%}"
    "{%- set mode = '/think' -%}{%- set custom = '' -%}{%- endif -%}"
    "{{- '<|im_start|>system\\nMode: ' + mode + '\\n\\n' + custom + '<|im_end|>\\n' -}}"
    "{%- for message in messages -%}{%- set content = message.content if message.content is string else '' -%}"
    "{%- if message.role == 'user' -%}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' -%}{% generation %}"
    "{{ '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}{% endgeneration %}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
QWEN_35 = (
    "{%- macro text(content) %}{%- if content is string %}{{- content | trim }}{%- else %}{%- for part in content %}"
    "{{- part.text }}{%- endfor %}{%- endif %}{%- endmacro %}{%- set ns = namespace(last=0) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}{%- for message in messages %}{%- set content = text(message.content) %}"
    "{%- if message.role == 'assistant' %}{%- set thought = message.reasoning_content | default('', true) %}"
    "{%- if '</think>' in content %}{%- set thought = content.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\\n' }}{%- else %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is true %}{{- '<think>\\n' }}{%- else %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
GEMMA_4 = (
    "{{ bos_token }}{%- set rest = messages -%}{%- if messages[0]['role'] in ['system', 'developer'] -%}"
    "{{ '<|turn>system\\n' }}{%- if enable_thinking is defined and enable_thinking -%}{{ '<|think|>\\n' }}{%- endif -%}"
    "{{ messages[0]['content'] | trim + '<turn|>\\n' }}{%- set rest = messages[1:] -%}"
    "{%- elif enable_thinking is defined and enable_thinking -%}{{ '<|turn>system\\n<|think|>\\n<turn|>\\n' }}"
    "{%- endif -%}{%- for message in rest -%}{%- if message['role'] == 'assistant' -%}{{ '<|turn>model\\n' }}"
    "{%- if message['reasoning'] is defined and loop.last -%}"
    "{{ '<|channel>thought\\n' + message['reasoning'] + '<channel|>' }}{%- endif -%}"
    "{{ message['content'].split('<channel|>')[-1] | trim }}{%- else -%}"
    "{{ '<|turn>' + message['role'] + '\\n' + message['content'] | trim }}{%- endif -%}{{ '<turn|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|turn>model\\n' }}{%- endif -%}"
)
GRANITE = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = 'You help.' %}{%- endif %}"
    "{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}"
    "{%- for message in messages %}{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}"
    "{{- message['content'] + '<|end_of_text|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
CHATML = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
HARMONY = (
    "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
    "{{- '<|start|>system<|message|>Date: ' + strftime_now('%Y') + '\\nReasoning: ' + reasoning_effort }}"
    "{{- '\\n# Valid channels: analysis, commentary, final.<|end|>' }}"
    "{%- if messages[0].role in ['system', 'developer'] %}{%- set told = messages[0].content %}"
    "{%- set rest = messages[1:] %}{{- '<|start|>developer<|message|># Instructions\\n\\n' + told + '<|end|>' }}"
    "{%- else %}{%- set rest = messages %}{%- endif %}{%- for message in rest %}"
    "{%- if message.role == 'assistant' %}{%- if message.thinking is defined and loop.last %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- else %}"
    "{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)

HEADS = {"attention.key_length": 32, "attention.value_length": 32}


@dataclass(frozen=True)
class Recipe:
    """A section: the published configuration, the full shape, what the vendor's files say besides."""

    section: str
    config: str
    shape: str
    specials: dict[str, int]  # in the shrunk vocabulary
    bos: str | None
    eos: str  # of the tokenizer
    ends: list[int]  # of generation_config.json
    template: str
    adds_bos: bool = False
    drafter: str = ""  # what drafts in the bundle that the section exports
    gguf: tuple[str, dict[str, Any]] | None = None  # architecture, and keys besides those of every one


GEMMA_4_TOKENS = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<|think|>": 98, "<|channel>": 100}
GEMMA_4_TOKENS |= {"<channel|>": 101, "<|turn>": 105, "<turn|>": 106}
GEMMA_4_SAYS = GEMMA_4_TOKENS, "<bos>", "<eos>", [1, 106], GEMMA_4, True  # what the files of all sizes do
LFM2_TOKENS = {"<|pad|>": 0, "<|startoftext|>": 1, "<|endoftext|>": 2, "<|im_start|>": 6, "<|im_end|>": 7}
LFM2_SAYS = LFM2_TOKENS, "<|startoftext|>", "<|im_end|>", [7], CHATML, True
RECIPES = (
    Recipe(
        "Qwen3 0.6B",
        "Qwen3-0.6B",
        "qwen3-0.6b",
        {"<|endoftext|>": 313, "<|im_start|>": 314, "<|im_end|>": 315},
        None,
        "<|im_end|>",
        [315, 313],
        QWEN,
        gguf=("qwen3", HEADS | {"rope.freq_base": 1e6}),
    ),
    Recipe(
        "Llama 3.2 1B",
        "Llama-3.2-1B",
        "llama-3.2-1b",
        {"<|begin_of_text|>": 300, "<|end_of_text|>": 301, "<|start_header_id|>": 306, "<|end_header_id|>": 307}
        | {"<|eom_id|>": 308, "<|eot_id|>": 309},
        "<|begin_of_text|>",
        "<|eot_id|>",
        [301, 308, 309],
        LLAMA,
        adds_bos=True,
    ),
    Recipe(
        "Gemma 3 1B",
        "gemma-3-1b-it",
        "gemma-3-1b",
        {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<start_of_turn>": 105, "<end_of_turn>": 106},
        "<bos>",
        "<eos>",
        [1, 106],
        GEMMA,
        adds_bos=True,
    ),
    Recipe(
        "SmolLM3",
        "SmolLM3-3B",
        "smollm3-3b",
        {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|pad|>": 4, "<|im_start|>": 11, "<|im_end|>": 12},
        None,
        "<|im_end|>",
        [12],
        SMOLLM,
    ),
    Recipe(
        "Gemma 4 E2B",
        "gemma-4-E2B-it",
        "gemma-4-e2b",
        *GEMMA_4_SAYS,
        drafter="assistant",
        gguf=(
            "gemma4",
            {
                "feed_forward_length": [96] * 5 + [192] * 5,
                "embedding_length_per_layer_input": 16,
                "attention.key_length": 32,
                "attention.value_length": 32,
                "attention.key_length_swa": 16,
                "attention.value_length_swa": 16,
                "attention.sliding_window": 16,
                "attention.sliding_window_pattern": [True, True, True, True, False] * 2,
                "attention.shared_kv_layers": 5,
                "rope.freq_base": 1e6,
                "final_logit_softcapping": 30.0,
            },
        ),
    ),
    Recipe(
        "Qwen3.5 0.8B",
        "Qwen3.5-0.8B",
        "qwen3.5-0.8b",
        {"<|endoftext|>": 5, "<|im_start|>": 6, "<|im_end|>": 7, "<|vision_start|>": 12, "<|vision_end|>": 13}
        | {"<|image_pad|>": 15, "<|video_pad|>": 16},
        None,
        "<|im_end|>",
        [7, 5],
        QWEN_35,
        drafter="mtp",
        gguf=(
            "qwen35",
            HEADS
            | {"full_attention_interval": 4, "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0]}
            | {"rope.freq_base": 1e7, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2}
            | {"ssm.time_step_rank": 2, "ssm.inner_size": 32},
        ),
    ),
    Recipe(
        "Granite 4.0 H 1B",
        "granite-4.0-h-1b",
        "granite-4.0-h-1b",
        {"<|end_of_text|>": 0, "<|pad|>": 6, "<|start_of_role|>": 7, "<|end_of_role|>": 8},
        "<|end_of_text|>",
        "<|end_of_text|>",
        [0],
        GRANITE,
        gguf=(
            "granitehybrid",
            {"attention.head_count_kv": [0, 0, 2, 0], "attention.scale": 0.0078125, "embedding_scale": 12.0}
            | {"residual_scale": 0.246, "logit_scale": 6.0, "rope.dimension_count": 16, "rope.freq_base": 1e4}
            | {"rope.scaling.finetuned": False, "expert_count": 0, "expert_used_count": 0}
            | {"expert_shared_feed_forward_length": 96, "ssm.conv_kernel": 4, "ssm.state_size": 128}
            | {"ssm.group_count": 1, "ssm.inner_size": 128, "ssm.time_step_rank": 4, "vocab_size": 320},
        ),
    ),
    Recipe(
        "LFM2 1.2B",
        "LFM2-1.2B",
        "lfm2-1.2b",
        *LFM2_SAYS,
        gguf=(
            "lfm2",
            {"attention.head_count_kv": [0, 0, 2, 0, 2, 0], "shortconv.l_cache": 3}
            | {"rope.freq_base": 1e6, "feed_forward_length": 128},
        ),
    ),
    Recipe(
        "Falcon-H1 1.5B",
        "Falcon-H1-0.5B-Instruct",
        "falcon-h1-1.5b",
        {"<|pad|>": 0, "<|begin_of_text|>": 1, "<|end_of_text|>": 11, "<|im_start|>": 227, "<|im_end|>": 228},
        "<|begin_of_text|>",
        "<|end_of_text|>",
        [11, 228],
        CHATML,
        gguf=(
            "falcon-h1",
            {"attention.key_length": 24, "attention.value_length": 24, "rope.freq_base": 1e11}
            | {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 1, "ssm.time_step_rank": 3}
            | {"ssm.inner_size": 96},
        ),
    ),
    Recipe(
        "gpt-oss 20B",
        "gpt-oss-20b",
        "gpt-oss-20b",
        {"<|startoftext|>": 0, "<|endoftext|>": 1, "<|return|>": 2, "<|constrain|>": 3, "<|channel|>": 5}
        | {"<|start|>": 6, "<|end|>": 7, "<|message|>": 8, "<|call|>": 12},
        "<|startoftext|>",
        "<|return|>",
        [2, 1, 12],
        HARMONY,
        gguf=(
            "gpt-oss",
            {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 16}
            | {"expert_count": 8, "expert_used_count": 4, "expert_feed_forward_length": 64}
            | {"rope.freq_base": 150000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0}
            | {"rope.scaling.original_context_length": 32},
        ),
    ),
    Recipe(
        "LFM2 8B-A1B",
        "LFM2-8B-A1B",
        "lfm2-8b-a1b",
        *LFM2_SAYS,
        gguf=(
            "lfm2moe",
            {"attention.head_count_kv": [0, 0, 2, 0], "shortconv.l_cache": 3, "rope.freq_base": 1e6}
            | {"expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 32}
            | {"expert_gating_func": 2, "leading_dense_block_count": 2},
        ),
    ),
    Recipe(
        "Gemma 4 26B-A4B",
        "gemma-4-26B-A4B-it",
        "gemma-4-26b-a4b",
        *GEMMA_4_SAYS,
        gguf=(
            "gemma4",
            {"attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16}
            | {"attention.value_length_swa": 16, "attention.head_count_kv": [2, 2, 2, 2, 2, 1]}
            | {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True] * 5 + [False]}
            | {"embedding_length_per_layer_input": 0, "rope.freq_base": 1e6, "final_logit_softcapping": 30.0}
            | {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64},
        ),
    ),
    Recipe(
        "Qwen3 30B-A3B",
        "Qwen3-30B-A3B",
        "qwen3-30b-a3b",
        {"<|endoftext|>": 1, "<|im_end|>": 2, "<|im_start|>": 3},
        None,
        "<|im_end|>",
        [2, 1],
        QWEN,
        gguf=(
            "qwen3moe",
            HEADS
            | {"expert_count": 16, "expert_used_count": 8, "expert_feed_forward_length": 32}
            | {"rope.freq_base": 1e6},
        ),
    ),
)
