# ruff: noqa: E501, RUF001
"""Chat templates in the formats that published models state, written anew, with the tokens that they use."""

import re

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_FOR, _END = "{% for m in messages %}", "{% endfor %}"
_IF_ASSISTANT = "{% if m.role == 'assistant' %}"
_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
_SYSTEM_FIRST = (
    "{% set first = '' %}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
)
# Reasoning `r` and the rest `c` of an answer; `last` is the number of the last question
_SPLIT = (
    "{% set c = m.content or '' %}{% set r = m.reasoning_content or '' %}{% if '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
_LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_IM = "<|im_start|>{{ m.role }}\n"
_ASK_IM = "{% if add_generation_prompt %}<|im_start|>assistant\n"


def _turns(begin: str, content: str, end: str, ask: str, head: str = "") -> str:
    return f"{head}{_FOR}{begin}{content}{end}{_END}{{% if add_generation_prompt %}}{ask}{{% endif %}}"


def _deepseek(header: str, call: str) -> str:
    return (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
        "<｜User｜>{{ m.content }}{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
        f"{{% else %}}<｜Assistant｜>{call}{{{{ (m.content or '').split('</think>')[-1] }}}}<｜end▁of▁sentence｜>"
        f"{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<｜Assistant｜>{header}{{% endif %}}"
    )


def _thinking(condition: str, header: str, no_header: str) -> str:
    """Return a template of Qwen's later models: answers after the last question have a block of reasoning.

    :param condition: of a block
    """
    return (
        f"{_LAST}{_TOOLS}{_FOR}{_IM}{_IF_ASSISTANT}{_SPLIT}{{% if loop.index0 > ns.last and ({condition}) %}}<think>\n"
        f"{{{{ r }}}}\n</think>\n\n{{% endif %}}{{{{ c }}}}{_CALLS}{{% else %}}{{{{ m.content }}}}{{% endif %}}<|im_end|>\n{_END}"
        f"{_ASK_IM}{{% if enable_thinking is defined and enable_thinking is false %}}{no_header}{{% else %}}{header}"
        "{% endif %}{% endif %}"
    )


_BLOCK = "<think>\n\n</think>\n\n"
_CHATML = f"{_FOR}{_IM}{{{{ m.content }}}}{_CALLS}<|im_end|>\n{_END}{_ASK_IM}{{% endif %}}"
_HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
_COMMAND = "<|START_OF_TURN_TOKEN|>{{ {'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}"
PUBLISHED = {
    "ChatML": _CHATML,
    "Qwen 2.5": _TOOLS + _CHATML,
    "Qwen 3": _thinking("loop.last or r", "", _BLOCK),
    "Qwen 3.5": _thinking("true", "<think>\n", _BLOCK),
    "Llama 3": _turns(_HEADER, "{{ m.content | trim }}" + _CALLS, "<|eot_id|>",
                      "<|start_header_id|>assistant<|end_header_id|>\n\n", "{{ bos_token }}"),
    "Llama 2": f"{_SYSTEM_FIRST}{_ALTERNATE}{_FOR}{{% if m.role == 'user' %}}{{{{ bos_token }}}}[INST] "
    "{{ (first if loop.first else '') + m.content }} [/INST]{% else %} {{ m.content }} </s>{% endif %}{% endfor %}",
    "Mistral": f"{{{{ bos_token }}}}{_ALTERNATE}{_FOR}{{% if m.role == 'user' %}}[INST] {{{{ m.content }}}}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
    "Gemma 2": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + _ALTERNATE + _turns("<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n",
                          "{{ m.content | trim }}", "<end_of_turn>\n", "<start_of_turn>model\n"),
    "Gemma 3": "{{ bos_token }}" + _SYSTEM_FIRST + _ALTERNATE
    + _turns("<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first }}",
             "{{ m.content | trim }}", "<end_of_turn>\n", "<start_of_turn>model\n"),
    "Gemma 4": "{{ bos_token }}" + _FOR + "{% if m.role == 'tool' %}<|tool_response>{{ m.content }}<tool_response|>"
    "{% else %}{% if not loop.first and messages[loop.index0 - 1].role == 'tool' %}{% else %}<|turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}{{ m.content }}{% if m.tool_calls %}<|tool_call>"
    "{{ m.tool_calls[0].function | tojson }}<tool_call|>{% else %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}",
    "Zephyr": _turns("<|{{ m.role }}|>\n", "{{ m.content }}", "</s>\n", "<|assistant|>\n"),
    "Vicuna": _SYSTEM_FIRST + "{{ bos_token }}{{ first }}" + _FOR
    + "{% if m.role == 'user' %}USER: {{ m.content }}{% else %} ASSISTANT: {{ m.content }}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}",
    "OpenChat": _turns("GPT4 Correct {{ m.role | title }}: ", "{{ m.content }}", "<|end_of_turn|>",
                       "GPT4 Correct Assistant:", "{{ bos_token }}"),
    "Phi 3": _turns("<|{{ m.role }}|>\n", "{{ m.content }}", "<|end|>\n", "<|assistant|>\n"),
    "Phi 4": _turns("<|im_start|>{{ m.role }}<|im_sep|>", "{{ m.content }}", "<|im_end|>",
                    "<|im_start|>assistant<|im_sep|>"),
    "Tülu": _turns("<|{{ m.role }}|>\n", "{{ m.content }}", "{{ eos_token if m.role == 'assistant' }}\n",
                   "<|assistant|>\n"),
    "Command R": _turns(_COMMAND + ".get(m.role, '<|SYSTEM_TOKEN|>') }}", "{{ m.content }}", "<|END_OF_TURN_TOKEN|>",
                        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "{{ bos_token }}"),
    "Granite 3": _turns("<|start_of_role|>{{ m.role }}<|end_of_role|>", "{{ m.content }}", "<|end_of_text|>\n",
                        "<|start_of_role|>assistant<|end_of_role|>"),
    "EXAONE": _turns("[|{{ m.role }}|]", "{{ m.content }}", "[|endofturn|]\n", "[|assistant|]"),
    "LFM 2": "{{ bos_token }}" + _CHATML,
    "SmolLM 3": "{% set mode = '/think' if enable_thinking | default(true) else '/no_think' %}<|im_start|>system\n"
    "Reasoning Mode: {{ mode }}<|im_end|>\n" + _turns(_IM, "{% if m.role == 'assistant' and mode == '/no_think' %}<think>\n\n</think>\n{% endif %}{{ (m.content or '').lstrip('\n') }}" + _CALLS,
    "<|im_end|>\n", "<|im_start|>assistant\n{% if mode == '/no_think' %}<think>\n\n</think>\n{% endif %}"),
    "Nemotron 3": f"{_LAST}{_FOR}{_IM}{_IF_ASSISTANT}{_SPLIT}{{% if r and loop.index0 > ns.last %}}<think>\n{{{{ r }}}}\n"
    f"</think>\n{{% else %}}<think></think>{{% endif %}}{{{{ c }}}}{_CALLS}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    f"<|im_end|>\n{_END}{_ASK_IM}<think>{{% if enable_thinking | default(true) %}}\n{{% else %}}</think>{{% endif %}}"
    "{% endif %}",
    "DeepSeek R1": _deepseek("<think>\n", "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"),
    "DeepSeek V3": _deepseek("", "{% for c in m.tool_calls or [] %}{{ '' + c.function.arguments }}{% endfor %}"),
    "gpt-oss": f"{_LAST}{_FOR}{_IF_ASSISTANT}{_SPLIT}<|start|>assistant{{% if r and loop.index0 > ns.last %}}<|channel|>"
    "analysis<|message|>{{ r }}<|end|><|start|>assistant{% endif %}{% if m.tool_calls %} to=functions."
    "{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|channel|>final<|message|>{{ c }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    # Without a special token that ends an answer
    "GLM 4": _turns("<|{{ m.role }}|>\n", "{{ m.content }}", "", "<|assistant|>\n"),
    "Falcon": _turns("{{ m.role | title }}: ", "{{ m.content }}", "\n\n", "Assistant:"),
}  # fmt: skip

# Published tokenizers have these as added tokens that are not special.
ORDINARY = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
_SPECIAL = re.compile(
    r"<[|｜][\w▁]+[|｜]>|<\|turn>|<turn\|>|<\|?tool_\w+\|?>|\[\|endofturn\|\]|</?s>|<(?:start|end)_of_turn>|\[/?INST\]"
)


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the tokens that a template writes. Two newlines are one token."""
    found = [x for x in dict.fromkeys(_SPECIAL.findall(template)) if x not in ORDINARY]
    found += [f"<|{role}|>" for role in ("system", "user", "assistant") if "<|{{ m.role }}|>" in template]
    tokens = ["<|endoftext|>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate([*tokens, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<bos>")
    tokenizer.add_tokens([AddedToken(x, special=True, normalized=False) for x in found])
    tokenizer.add_tokens([AddedToken(x, special=False, normalized=False) for x in ORDINARY])
    tokenizer.chat_template = template
    return tokenizer
