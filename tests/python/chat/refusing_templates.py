"""Chat templates that refuse conversations, each as a family of models does."""

from __future__ import annotations

_TOOLS = r"""
{%- if tools %}{{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}
{%- endif %}
"""
_CALLS = r"""
{%- macro calls(message) %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
"""
_END = r"{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"

# Qwen 3.5: one system message, the first; some message of the user.
SYSTEM_FIRST = (
    _CALLS
    + _TOOLS
    + r"""
{%- set ns = namespace(asked=false) %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- elif message.role not in ('system', 'user', 'assistant', 'tool') %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
    {%- if message.role == 'user' %}{%- set ns.asked = true %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') + calls(message) + '<|im_end|>\n' }}
{%- endfor %}
{%- if not ns.asked %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
"""
    + _END
)

# Mistral: user and assistant by turns, but for calls and their results, whose ids have nine signs.
BY_TURNS = (
    _CALLS
    + _TOOLS
    + r"""
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}
{%- endif %}
{%- set ns = namespace(turn=0) %}
{%- for message in rest %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.turn % 2 == 0) %}
            {{- raise_exception('After the optional system message, roles must alternate.') }}
        {%- endif %}
        {%- set ns.turn = ns.turn + 1 %}
    {%- elif message.role == 'system' %}
        {{- raise_exception('Only user, assistant and tool roles are supported.') }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- if call.id is not defined or call.id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
    {%- endfor %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') + calls(message) + '<|im_end|>\n' }}
{%- endfor %}
"""
    + _END
)

# Gemma 2: no system message, by turns, no tools.
NO_SYSTEM = (
    r"""
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
"""
    + _END
)

# Llama 3: one call in a message. DeepSeek R1: the last system message, at the top. MiniMax: the first alone.
ONE_CALL = (
    _CALLS
    + _TOOLS
    + r"""
{%- for message in messages %}
    {%- if message.tool_calls and message.tool_calls | length != 1 %}
        {{- raise_exception('This model only supports single tool-calls at once!') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') + calls(message) + '<|im_end|>\n' }}
{%- endfor %}
"""
    + _END
)
LAST_SYSTEM = (
    r"""
{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}{%- set ns.system = message.content %}{%- endfor %}
{{- ns.system + '\n' }}
{%- for message in messages if message.role != 'system' %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
"""
    + _END
)
FIRST_SYSTEM = (
    r"""
{%- for message in messages if message.role != 'system' or loop.first %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
"""
    + _END
)

# Seed-OSS, Command R: a signature from the types of parameters, which have to be one word each.
SIGNATURES = (
    _CALLS
    + r"""
{%- set names = {'string': 'str', 'integer': 'int', 'array': 'list', 'object': 'dict', 'boolean': 'bool'} %}
{%- macro kind(spec) %}
    {%- if spec.type in ('number', 'integer') %}{{- 'number' }}
    {%- elif names[spec.type] is defined %}{{- names[spec.type] }}
        {%- if spec.type == 'array' %}{{- '[' + kind(spec['items']) + ']' }}{%- endif %}
    {%- else %}{{- raise_exception('no such type') }}
    {%- endif %}
{%- endmacro %}
{%- for tool in tools or [] %}
    {{- 'def ' + tool.function.name + '(' }}
    {%- for name, spec in tool.function.parameters.properties | items %}
        {{- name + ': ' + kind(spec) + ' # ' + spec.description + '\n' }}
    {%- endfor %}
    {{- '):\n' }}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') + calls(message) + '<|im_end|>\n' }}
{%- endfor %}
"""
    + _END
)

# Devstral: a list of parts has a text in front, if anything.
NO_THOUGHTS = r"""
{{- '[SYSTEM_PROMPT][/SYSTEM_PROMPT]' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- message.content if message.content is string else message.content[0].text }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- arguments if arguments is string else arguments | tojson }}
        {%- endfor %}
        {{- '</s>' }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}
"""

REFUSING = {
    "system first": SYSTEM_FIRST,
    "by turns": BY_TURNS,
    "no system": NO_SYSTEM,
    "one call": ONE_CALL,
    "last system": LAST_SYSTEM,
    "first system": FIRST_SYSTEM,
    "no thoughts": NO_THOUGHTS,
}
