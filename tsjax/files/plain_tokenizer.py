# SPDX-License-Identifier: Apache-2.0
"""A tokenizer by the package tokenizers alone: to import transformers takes longer than a token.

Knows what generation asks of a tokenizer. Does not know files, but for those that it writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tsjax.base.errors import BadType, BadValue, NotSupported

SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
CONFIG, TOKENIZER = "tokenizer_config.json", "tokenizer.json"


class Described(NamedTuple):
    """A tokenizer, and what the class of transformers is told beside it."""

    tokenizer: Any  # tokenizers.Tokenizer
    settings: dict[str, Any]


def special_names(settings: Mapping[str, Any]) -> list[str]:
    """What its special tokens are called, each once."""
    named = [settings[name] for name in SPECIAL_TOKENS if settings.get(name) is not None]
    return list(dict.fromkeys([*named, *(settings.get("extra_special_tokens") or ())]))


def add_special_tokens(tokenizer: Any, settings: Mapping[str, Any], added: Sequence[Any]) -> None:
    """Those of the settings beside those of its file, as transformers does it."""
    named = {settings.get(name) for name in SPECIAL_TOKENS}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in added:
        token.special = token.special or token.content in named
        known.add(token.content)
    more = [special_token(name) for name in special_names(settings) if name not in known]
    tokenizer.add_tokens([*added, *more])


def special_token(content: str) -> Any:
    from tokenizers import AddedToken

    return AddedToken(content, special=True)


class Encoded(dict[str, Any]):
    """`input_ids` and `attention_mask`, as entries and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class PlainTokenizer:
    """What generation asks of a tokenizer, under the names that it has in transformers.

    Attributes:
      name_or_path: where it was read.
      backend_tokenizer: the `tokenizers.Tokenizer`, which does the work.
      chat_template: a template, several by their names, or None.
      bos_token: and eos_token, pad_token, ..., each also with _id behind: None if there is none.
    """

    is_fast = True

    def __init__(self, path: str, described: Described):
        self.name_or_path, self.backend_tokenizer = path, described.tokenizer
        self._settings = dict(described.settings)
        self.chat_template = self._settings.get("chat_template")
        self.padding_side = self._settings.get("padding_side", "right")
        self.added_tokens_decoder = described.tokenizer.get_added_tokens_decoder()

    # --- texts and ids

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        return self(text, add_special_tokens, **options)["input_ids"]

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, *,
        padding: bool | str = False, return_tensors: str | None = None, verbose: bool = True,
        **others: Any,
    ) -> Encoded:  # fmt: skip
        """The ids of a text, or rows of those of several, and what of them is not padding.

        Args:
          padding: True or "longest" fills the rows up to the longest.
          return_tensors: "np" for arrays.
        """
        if any(value not in (None, False) for value in others.values()):
            raise BadType(f"{', '.join(others)} is not known here; {self._elsewhere}")
        if return_tensors not in (None, "np") or padding not in (False, True, "longest"):
            found = f"padding={padding!r}, return_tensors={return_tensors!r}"
            raise NotSupported(f"{found} is not supported here; {self._elsewhere}")
        one = isinstance(text, str)
        how = {"add_special_tokens": add_special_tokens}
        encode, encode_all = self.backend_tokenizer.encode, self.backend_tokenizer.encode_batch
        rows = [
            row.ids for row in ([encode(text, **how)] if one else encode_all(list(text), **how))
        ]
        masks = [[1] * len(row) for row in rows]
        if padding:
            rows, masks = self._padded(rows, masks)
        if return_tensors is not None:
            return Encoded(input_ids=np.asarray(rows), attention_mask=np.asarray(masks))
        if one:
            return Encoded(input_ids=rows[0], attention_mask=masks[0])
        return Encoded(input_ids=rows, attention_mask=masks)

    def _padded(self, rows: list[list[int]], masks: list[list[int]]) -> Iterator[list[list[int]]]:
        index, longest = self.pad_token_id, max(map(len, rows), default=0)
        if index is None:
            raise BadValue("padding needs a pad_token, and this tokenizer has none")
        for values, fill in ((rows, index), (masks, 0)):
            more = [[fill] * (longest - len(row)) for row in values]
            pairs = zip(values, more, strict=True)
            left = self.padding_side == "left"
            yield [pad + row if left else row + pad for row, pad in pairs]

    def decode(
        self, ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: Any = None
    ) -> Any:
        """The text of a row of ids; of several rows a list. Spaces stay as the tokens have them."""
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        row = [ids] if isinstance(ids, int) else list(ids)
        if row and np.ndim(row[0]):
            return [self.decode(one, skip_special_tokens) for one in row]
        return self.backend_tokenizer.decode(row, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, rows: Any, skip_special_tokens: bool = False, **how: Any) -> list[str]:
        return [self.decode(row, skip_special_tokens, **how) for row in rows]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).tokens

    # --- the vocabulary

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    @property
    def vocab_size(self) -> int:
        """Without the tokens that were added to it."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        if np.ndim(ids):
            return [self.backend_tokenizer.id_to_token(int(index)) for index in ids]
        return self.backend_tokenizer.id_to_token(int(ids))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            index = self.backend_tokenizer.token_to_id(tokens)
            return self.unk_token_id if index is None and tokens != self.unk_token else index
        return [self.convert_tokens_to_ids(token) for token in tokens]

    @property
    def special_tokens_map(self) -> dict[str, str]:
        named = ((name, self._settings.get(name)) for name in SPECIAL_TOKENS)
        return {name: token for name, token in named if token is not None}

    @property
    def all_special_tokens(self) -> list[str]:
        return special_names(self._settings)

    @property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copies and pickles look for
            raise AttributeError(name)
        if name in SPECIAL_TOKENS:
            return self._settings.get(name)
        if name.removesuffix("_id") in SPECIAL_TOKENS:
            token = self._settings.get(name.removesuffix("_id"))
            return None if token is None else self.convert_tokens_to_ids(token)
        raise AttributeError(f"this tokenizer has no {name!r}; {self._elsewhere}")

    @property
    def _elsewhere(self) -> str:
        load, path = "transformers.AutoTokenizer.from_pretrained", self.name_or_path
        if os.path.isdir(path):
            return f"that of transformers is {load}({path!r})"
        return f"that of transformers is {load}(FOLDER) after .save_pretrained(FOLDER) of this one"

    def __repr__(self) -> str:
        return f"PlainTokenizer({self.name_or_path!r}, {len(self)} tokens)"

    # --- chats and files

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """The template of that name, the text itself, or by default the tokenizer's own."""
        own = self.chat_template
        if isinstance(own, dict):
            usual = "tool_use" if tools is not None and "tool_use" in own else "default"
            name = usual if chat_template is None else chat_template
            if chat_template is None and name not in own:
                raise BadValue(f"none of its chat templates is the default: {sorted(own)}")
            return own.get(name, name)
        found = own if chat_template is None else chat_template
        if found is None:
            raise BadValue("this tokenizer has no chat template")
        return found

    def apply_chat_template(
        self, conversation: Any, tools: Any = None, documents: Any = None,
        chat_template: str | None = None, add_generation_prompt: bool = False,
        continue_final_message: bool | str = False, tokenize: bool = True, *,
        return_dict: bool = True, padding: bool | str = False, return_tensors: str | None = None,
        **variables: Any,
    ) -> Any:  # fmt: skip
        """A chat, or several, as the template writes it: a text, or with `tokenize` its ids."""
        from tsjax.files.chat_template import render_chat

        refused = ("sanitize_control_tokens", "return_assistant_tokens_mask", "tokenizer_kwargs",
                   "truncation", "max_length")  # fmt: skip
        for name in refused:
            if variables.pop(name, None):
                raise NotSupported(f"{name} is not supported here; {self._elsewhere}")
        if len(conversation) == 0:
            raise BadValue("a chat has at least one message")
        if continue_final_message and add_generation_prompt:
            wanted = "the last message is continued, or another one begun"
            raise BadValue(f"continue_final_message and add_generation_prompt exclude: {wanted}")
        several = isinstance(conversation[0], list | tuple)
        template = self.get_chat_template(chat_template, tools)
        how = {"add_generation_prompt": add_generation_prompt, **self.special_tokens_map}
        texts = [
            render_chat(template, chat, tools, documents, continue_final_message,
                        **{**how, **variables})
            for chat in (conversation if several else [conversation])
        ]  # fmt: skip
        text = texts if several else texts[0]
        if not tokenize:
            return text
        found = self(text, False, padding=padding, return_tensors=return_tensors)
        return found if return_dict else found["input_ids"]

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Writes a folder that transformers and tsjax read."""
        os.makedirs(folder, exist_ok=True)
        self.backend_tokenizer.save(os.path.join(folder, TOKENIZER))
        settings = {name: value for name, value in self._settings.items() if value is not None}
        if isinstance(self.chat_template, dict):
            named = self.chat_template.items()
            settings["chat_template"] = [{"name": n, "template": text} for n, text in named]
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        with open(os.path.join(folder, CONFIG), "w", encoding="utf-8") as file:
            json.dump(settings, file, indent=2, ensure_ascii=False)
