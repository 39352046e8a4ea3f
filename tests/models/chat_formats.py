"""How the chat models of every family are published: special tokens, ends of sequence, and the template of their chats.

The templates are made for these tests, in the manner of each family and as short as that allows.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": " Who? "},
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """What a family's files say.

    Attributes:
      special: its special tokens, by which those below are found.
      eos: of tokenizer_config.json.
      ends: of generation_config.json: one token, or a list.
      bos: of tokenizer_config.json.
      template: None for models that were never made to chat.
      prompt: of `MESSAGES`.
      in_file: whether the template has a file of its own, chat_template.jinja.
      spaces: of SentencePiece tokenizers: whether every text starts with one; None is a byte-level tokenizer.
      settings: more of tokenizer_config.json.
    """

    special: tuple[str, ...]
    eos: str
    ends: str | tuple[str, ...]
    bos: str | None = None
    template: str | None = None
    prompt: str = ""
    in_file: bool = False
    spaces: bool | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def stops(self) -> set[str]:
        """Every token that ends an answer."""
        return {self.eos, *([self.ends] if isinstance(self.ends, str) else self.ends)}

    def write(self, folder: Path) -> None:
        """Adds the files to a checkpoint's folder."""
        backend = _byte_level() if self.spaces is None else _sentencepiece(self.spaces)
        backend.add_special_tokens(list(self.special))
        backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"bos_token": self.bos, "eos_token": self.eos, **self.settings}
        if self.in_file and self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        elif self.template is not None:
            config["chat_template"] = self.template
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        ends = backend.token_to_id(self.ends) if isinstance(self.ends, str) else [*map(backend.token_to_id, self.ends)]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")


def _byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(spaces: bool) -> tokenizers.Tokenizer:
    vocabulary = {text: i for i, text in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    start = [normalizers.Prepend("▁")] if spaces else []
    backend.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", "▁")])
    end = [decoders.Strip(" ", 1, 0)] if spaces else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end])
    return backend


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML = (
    "{%- for message in messages %}\n{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "\n{%- endfor %}\n{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
)
_CHATML_PROMPT = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n Who? <|im_end|>\n"
    "<|im_start|>assistant\n"
)
_DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN2 = ChatFormat(
    special=_IM,
    eos="<|im_end|>",
    ends=("<|im_end|>", "<|endoftext|>"),
    template=_DEFAULT_SYSTEM,
    prompt="<|im_start|>system\nYou are helpful.<|im_end|>\n" + _CHATML_PROMPT,
    settings={"pad_token": "<|endoftext|>"},
)
_QWEN3 = ChatFormat(
    special=(*_IM, "<think>", "</think>"),
    eos="<|im_end|>",
    ends=("<|im_end|>", "<|endoftext|>"),
    template=_CHATML.replace(
        "assistant\\n' }}\n{%- endif %}",
        "assistant\\n' }}\n{%- if enable_thinking is defined and enable_thinking is false %}\n"
        "{{- '<think>\\n\\n</think>\\n\\n' }}\n{%- endif %}\n{%- endif %}",
    ),
    prompt=_CHATML_PROMPT,
    settings={"add_bos_token": False, "pad_token": "<|endoftext|>"},
)
_MISTRAL = ChatFormat(
    special=("<s>", "</s>"),
    bos="<s>",
    eos="</s>",
    ends="</s>",
    spaces=True,
    template=(
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate: user, assistant, user, ...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    prompt="<s>[INST] Hi [/INST]Hello</s>[INST]  Who?  [/INST]",
    settings={"add_bos_token": True, "add_eos_token": False},
)
_GEMMA = ChatFormat(
    special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    bos="<bos>",
    eos="<eos>",
    ends="<eos>",
    spaces=False,
    template=(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else "
        "message['role'] %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    prompt=(
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nWho?<end_of_turn>\n<start_of_turn>model\n"
    ),
    settings={"add_bos_token": True},
)
_GEMMA2 = dataclasses.replace(_GEMMA, ends=("<eos>", "<end_of_turn>"))
_GPT2 = ChatFormat(special=("<|endoftext|>",), bos="<|endoftext|>", eos="<|endoftext|>", ends="<|endoftext|>")


CHAT_FORMATS: Mapping[str, ChatFormat] = {
    "llama": ChatFormat(  # 3 and later; 2 is like Mistral
        special=(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        template=(
            "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
            "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
            "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
        ),
        prompt=(
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
    ),
    "gpt_oss": ChatFormat(
        special=("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"),
        bos="<|startoftext|>",
        eos="<|return|>",
        ends=("<|return|>", "<|endoftext|>", "<|call|>"),
        template=(
            "{%- for message in messages %}\n"
            "{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}\n{%- endfor %}\n"
            "{%- if add_generation_prompt %}\n{{- '<|start|>assistant' }}\n{%- endif %}"
        ),
        prompt=(
            "<|start|>user<|message|>Hi<|end|><|start|>assistant<|message|>Hello<|end|>"
            "<|start|>user<|message|> Who? <|end|><|start|>assistant"
        ),
        in_file=True,
    ),
    "mistral": _MISTRAL,
    "mixtral": dataclasses.replace(_MISTRAL, in_file=True),
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": dataclasses.replace(_GEMMA2, in_file=True),
    "phi3": ChatFormat(
        special=("<s>", "<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"),
        bos="<s>",
        eos="<|endoftext|>",
        ends=("<|endoftext|>", "<|assistant|>", "<|end|>"),
        spaces=True,
        template=(
            "{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n'}}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
        ),
        prompt="<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\n Who? <|end|>\n<|assistant|>\n",
        settings={"add_bos_token": False, "add_eos_token": False},
    ),
    "smollm3": ChatFormat(
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
        bos="<|begin_of_text|>",
        eos="<|im_end|>",
        ends="<|im_end|>",
        template=_CHATML,
        prompt=_CHATML_PROMPT,
        in_file=True,
    ),
    "olmo2": ChatFormat(
        special=("<|endoftext|>", "<|user|>", "<|assistant|>"),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        ends="<|endoftext|>",
        template=(
            "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
            "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
        ),
        prompt="<|endoftext|><|user|>\nHi\n<|assistant|>\nHello<|endoftext|>\n<|user|>\n Who? \n<|assistant|>\n",
    ),
    "granite": ChatFormat(
        special=("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
        bos="<|end_of_text|>",
        eos="<|end_of_text|>",
        ends="<|end_of_text|>",
        template=(
            "{%- for message in messages %}\n{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + "
            "message['content'] + '<|end_of_text|>\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
            "{{- '<|start_of_role|>assistant<|end_of_role|>' }}\n{%- endif %}"
        ),
        prompt=(
            "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n"
            "<|start_of_role|>assistant<|end_of_role|>Hello<|end_of_text|>\n"
            "<|start_of_role|>user<|end_of_role|> Who? <|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
        ),
    ),
    "starcoder2": ChatFormat(
        special=("<|endoftext|>",),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        ends="<|endoftext|>",
        template=(
            "{{bos_token}}{%- for message in messages %}{%- if message['role'] == 'user' %}"
            "{{'### Instruction\n'}}{%- else %}{{'### Response\n'}}{%- endif %}{{message['content'] + '\n\n'}}"
            "{%- endfor %}{% if add_generation_prompt %}{{'### Response\n'}}{% endif %}"
        ),
        prompt="<|endoftext|>### Instruction\nHi\n\n### Response\nHello\n\n### Instruction\n Who? \n\n### Response\n",
    ),
    "stablelm": ChatFormat(
        special=_IM,
        eos="<|im_end|>",
        bos="<|endoftext|>",
        ends="<|im_end|>",
        template=_CHATML,
        prompt=_CHATML_PROMPT,
    ),
    "falcon": ChatFormat(
        special=("<|endoftext|>",),
        eos="<|endoftext|>",
        ends="<|endoftext|>",
        template=(
            "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
            "{{ {'user': 'User: ', 'assistant': 'Assistant: '}[message['role']] + message['content'].strip() }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '\nAssistant:' }}{% endif %}"
        ),
        prompt="User: Hi\nAssistant: Hello\nUser: Who?\nAssistant:",
    ),
    "gpt2": _GPT2,
    "gpt_neox": _GPT2,
    "opt": ChatFormat(special=("<pad>", "</s>"), bos="</s>", eos="</s>", ends="</s>"),
    "bloom": ChatFormat(special=("<s>", "</s>", "<pad>"), bos="<s>", eos="</s>", ends="</s>"),
}
"""By model_type."""
