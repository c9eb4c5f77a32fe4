"""Templates of models that think: Qwen 3's, whose models open thoughts, and Qwen 3.5's, which opens them."""

_TURNS = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"""
OPENS = _TURNS + "{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
FREE = _TURNS + "{%- endif %}{%- endif %}"
