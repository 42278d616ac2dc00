"""Chat templates in the styles of some models, and tokenizers with them."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TURN = "<|im_start|>{{ m.role }}\n"
TEMPLATES = {
    "chatml": f"{{% for m in messages %}}{_TURN}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}{_PROMPT}",
    # Marks what the model writes, but forgets the end of the turn.
    "marked": f"{{% for m in messages %}}{_TURN}{{% if m.role == 'assistant' %}}{{% generation %}}{{{{ m.content }}}}"
    f"{{% endgeneration %}}{{% else %}}{{{{ m.content }}}}{{% endif %}}<|im_end|>\n{{% endfor %}}{_PROMPT}",
    # As Qwen3: the last answer has its reasoning, the earlier ones do not.
    "reasoning": f"{{% for m in messages %}}{_TURN}{{% if m.role == 'assistant' and loop.last %}}<think></think>"
    f"{{% endif %}}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}{_PROMPT}",
    # As Llama 2 and Mistral: no other roles, and none twice.
    "alternating": "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    # As R1: what is asked to be continued is not what is shown.
    "changing": "{% for m in messages %}{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant <think> so {% endif %}",
    "endless": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<think>", "</think>", "<s>"]


def make_chat_tokenizer(style: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with a chat template. Its end of text is not what ends a turn of ChatML."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate([*tokens, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0], bos_token="<s>")
    tokenizer.chat_template = TEMPLATES.get(style)
    return tokenizer


def chat(*turns: str, roles: tuple[str, ...] = ("user", "assistant")) -> dict:
    """Return a row with messages of these roles in turn."""
    return {"messages": [{"role": roles[n % len(roles)], "content": turn} for n, turn in enumerate(turns)]}
