"""Chat templates by name (llama-cpp-python's `chat_format`), for files that have none or when another one is
wanted. They are Jinja. The vocabulary adds the start token, so a template's own is written once."""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# ChatML with tools in the prompt, calls in <tool_call> and results in <tool_response>, as Hermes and Qwen
# are trained.
CHATML_TOOLS = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
LLAMA_2 = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else none -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- bos_token + '[INST] ' -}}
        {%- if system is not none and loop.index0 == 1 -%}
            {{- '<<SYS>>\n' + system + '\n<</SYS>>\n\n' -}}
        {%- endif -%}
        {{- message.content + ' [/INST]' -}}
    {%- elif message.role == 'assistant' -%}
        {{- ' ' + message.content + ' ' + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""
LLAMA_3 = r"""
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""
# Neither has a role for a system message: it opens the first turn.
GEMMA = r"""
{{- bos_token -}}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{%- for message in messages if message.role != 'system' -%}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
    {{- (system if loop.first else '') + message.content + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""
MISTRAL = r"""
{{- bos_token -}}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{%- for message in messages if message.role != 'system' -%}
    {%- if message.role == 'user' -%}
        {{- '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' -}}
    {%- else -%}
        {{- ' ' + message.content + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""

# name: (template, what ends a turn where the vocabulary has no such token)
BUILT_IN = {
    "chatml": (CHATML, "<|im_end|>"),
    "chatml-function-calling": (CHATML_TOOLS, "<|im_end|>"),
    "llama-2": (LLAMA_2, "</s>"),
    "llama-3": (LLAMA_3, "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "mistral-instruct": (MISTRAL, "</s>"),
}
