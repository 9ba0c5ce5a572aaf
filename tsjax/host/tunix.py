# SPDX-License-Identifier: Apache-2.0
"""tsjax in the place of tunix's own sampler: its calls, its results, its weights.

Knows tunix's names: those of `tunix.generate.base_sampler.BaseSampler`, and those of the protocol
`tunix.experimental.rollout.sampler.Sampler`. Its classes are used where it is installed; without
it results have the same fields.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tsjax.base.checks import check, check_type
from tsjax.base.errors import BadType, BadValue, NotSupported
from tsjax.base.generation_config import GenerationConfig
from tsjax.files.hf_dicts import from_hf
from tsjax.files.model_in_memory import Model
from tsjax.host.generation import generate
from tsjax.host.nnx_view import as_nnx
from tsjax.host.prompts import encode_text
from tsjax.host.result import GenerationResult
from tsjax.host.rollouts import seed_of
from tsjax.model.params import Params

TUNIX_REASONS = {
    "eos": "stop",
    "stop_string": "stop",
    "repetition": "stop",
    "interrupted": "cancelled",
}


@dataclasses.dataclass
class SamplerOutput:
    """As tunix.generate.base_sampler has it."""

    text: list[str]
    logits: Any
    tokens: list[np.ndarray]
    padded_prompt_tokens: np.ndarray
    logprobs: list[list[float]] | None


@dataclasses.dataclass(kw_only=True)
class SamplingResponse:
    """As tunix.experimental.rollout.sampler has it."""

    request_id: str = ""
    text: str = ""
    prompt_token_ids: Any = None
    token_ids: Any = None
    logprobs: Any = None
    finish_reason: str = "stop"
    error: Any = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class LoadInfo:
    """As tunix.experimental.rollout.sampler has it."""

    num_requests_waiting: int = 0
    num_requests_running: int = 0
    kv_cache_usage_perc: float = 0.0


def _class_of(module: str, own: Any) -> Any:
    """tunix's class of the same name, where it is installed."""
    try:
        return getattr(importlib.import_module(module), own.__name__)
    except ImportError:
        return own


class TunixSampler:
    """A sampler for tunix. A row depends on the seed, on its prompt and on how many rows before it
    have the same prompt, and on nothing else in the batch. A stop token is left out, as tunix does.
    Log-probabilities are those of the distribution that was drawn from.

    Args:
      model: from `tsjax.load`.
      arguments: those of `generate` that tunix does not name: method, logits_processor and so on.
    """

    def __init__(self, model: Model, **arguments: Any):
        check_type(model, Model, "model", "what tsjax.load returns")
        self.model, self.policy_version = model, 0
        self._arguments, self._state = arguments, "created"

    # --- tunix.generate ------------------------------------------------------------------------

    def __call__(
        self,
        input_strings: str | Sequence[str],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        echo: bool = False,
        return_logits: bool = False,
        return_logprobs: bool = False,
        eos_tokens: Sequence[int] | None = None,
        forbidden_tokens: Sequence[int] | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        seed: Any = None,
        pad_output: bool = False,
        images: Any = None,
    ) -> Any:
        """Greedy at temperature 0, as tunix's. `max_prompt_length` is of the padded prompts in the
        result; nothing is padded to compute."""
        for name, value in (("return_logits", return_logits), ("images", images)):
            if value:
                raise NotSupported(f"{name}={value!r:.40} is not supported: leave it out")
        check(beam_size in (None, 1), "beam_size", beam_size, "None; there is no beam search")
        texts = [input_strings] if isinstance(input_strings, str) else list(input_strings)
        result = self._generated(
            [self.tokenize(text) for text in texts], seed,
            max_new_tokens=max_generation_steps, temperature=temperature, top_p=top_p, top_k=top_k,
            eos_token_id=eos_tokens, suppress_tokens=forbidden_tokens,
        )  # fmt: skip
        prompts, pad = result.prompts, self._pad_id
        answers = self._answers(result)
        tokens = [ids for ids, _, _ in answers]
        told = [some.tolist() for _, some, _ in answers]
        if echo:
            tokens = [np.concatenate(pair) for pair in zip(prompts, tokens, strict=True)]
            told = [[0.0] * len(p) + some for p, some in zip(prompts, told, strict=True)]
        longest = max(map(len, prompts))
        width = max(max_prompt_length or 0, 1 << (longest - 1).bit_length())
        if pad_output:
            size = max_generation_steps + (width if echo else 0)
            tokens = [np.pad(x, (0, size - len(x)), constant_values=pad) for x in tokens]
            told = [some + [0.0] * (size - len(some)) for some in told]
        padded = np.stack([np.pad(x, (width - len(x), 0), constant_values=pad) for x in prompts])
        decoded = [self._decoded(ids) for ids, _, _ in answers]
        output = _class_of("tunix.generate.base_sampler", SamplerOutput)
        return output(
            text=decoded, logits=[], tokens=tokens, padded_prompt_tokens=padded,
            logprobs=told if return_logprobs else None,
        )  # fmt: skip

    def tokenize(self, input_string: str) -> np.ndarray:
        return encode_text(self.model, input_string, "input_strings")

    @property
    def transformer(self) -> Any:
        return as_nnx(self.model)

    @property
    def transformer_state(self) -> Any:
        """The arrays as an nnx.State, as `as_nnx` names them."""
        from flax import nnx

        return nnx.state(self.transformer, nnx.Param)

    @transformer_state.setter
    def transformer_state(self, state: Any) -> None:
        self.update_params(state)

    def update_params(self, params: Any) -> None:
        """Other weights: tsjax's Params, the state or module of `as_nnx`, or tensors by the names
        of HuggingFace. Nothing is compiled anew."""
        if not isinstance(params, Params):
            params = self._params_of(params)
        self.model = self.model.with_params(params)

    def _params_of(self, given: Any) -> Params:
        from flax import nnx

        if isinstance(given, nnx.Module):
            given = nnx.state(given, nnx.Param)
        if isinstance(given, nnx.State):
            module = self.transformer
            nnx.update(module, given)
            return module.model.params
        if isinstance(given, Mapping):
            has_heads = any("medusa" in name for name in given)  # else the model's own stay
            own, cfg = self.model.params, self.model.cfg if has_heads else self.model.cfg.alone
            found = from_hf(given, cfg).params
            return own.replace(model=found.model, heads=found.heads or own.heads)
        wanted = "Params, the nnx.State or module of tsjax.as_nnx, or a dict of HuggingFace's names"
        raise BadType(f"params of {type(given).__name__} is not valid: {wanted}")

    # --- tunix.experimental --------------------------------------------------------------------

    def initialize(self) -> None:
        self._state = "running"

    async def start(self, **_: Any) -> bool:
        self._state = "running"
        return True

    async def stop(self, **_: Any) -> bool:
        self._state = "stopped"
        return True

    async def pause(self, **_: Any) -> bool:
        self._state = "paused"
        return True

    resume = start

    async def get_mesh(self, **_: Any) -> Any:
        sharding = jax.tree.leaves(self.model.params)[0].sharding
        return getattr(sharding, "mesh", None)

    async def sample(self, sampling_requests: Any, **_: Any) -> Any:
        """A response to each request, a single one to a single one. Those that ask for the same
        settings are one batch, which changes no token."""
        if self._state in ("paused", "stopped"):
            raise BadValue(f"the sampler is {self._state}: call resume() or start() first")
        alone = not isinstance(sampling_requests, list | tuple)
        requests = [sampling_requests] if alone else list(sampling_requests)
        batches: dict[tuple, list[int]] = {}
        for place, request in enumerate(requests):
            batches.setdefault(_settings_of(request), []).append(place)
        found: dict[int, Any] = {}
        for settings, places in batches.items():
            some = [requests[place] for place in places]
            found |= zip(places, self._responses(some, dict(settings)), strict=True)
        return found[0] if alone else [found[place] for place in range(len(requests))]

    def _responses(self, requests: list[Any], settings: dict[str, Any]) -> list[Any]:
        tells = settings.pop("return_logprobs")
        rows = [self._ids(getattr(one, "prompt", one)) for one in requests]
        result = self._generated(rows, settings.pop("seed"), **settings)
        response = _class_of("tunix.experimental.rollout.sampler", SamplingResponse)
        return [
            response(
                request_id=getattr(request, "request_id", ""),
                text=self._decoded(ids),
                prompt_token_ids=prompt,
                token_ids=ids,
                logprobs=told.astype(np.float32) if tells else None,
                finish_reason=reason,
            )
            for request, prompt, (ids, told, reason) in zip(
                requests, result.prompts, self._answers(result), strict=True
            )
        ]

    async def bind_weight_sync(self, **_: Any) -> None:
        return None

    async def get_weight_sync_metadata(self, **_: Any) -> Any:
        """Shape, type and sharding of each array, by its path."""
        state = self.transformer_state
        like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # noqa: E731
        return jax.tree.map(like, state)

    async def pre_weight_sync(self, sync_request: Any = None, **_: Any) -> bool:
        return True

    async def weight_sync(self, sync_request: Any = None, **given: Any) -> bool:
        """Takes `params`, as an argument or in the request's extra_config; see update_params."""
        extra = getattr(sync_request, "extra_config", None) or {}
        params = given.get("params", extra.get("params"))
        check(params is not None, "params", params, "in weight_sync(params=...) or extra_config")
        self.update_params(params)
        self.policy_version = getattr(sync_request, "policy_version", self.policy_version + 1)
        return True

    post_weight_sync = pre_weight_sync

    async def get_transfer_status(self, req_id: Any, **_: Any) -> str:
        return "SUCCESS"  # weight_sync has taken the arrays when it returns

    async def migrate_kv_cache(self, *_: Any, **__: Any) -> bool:
        raise NotSupported("migrate_kv_cache is not supported: a call keeps no cache")

    async def get_load_info(self, **_: Any) -> Any:
        return _class_of("tunix.experimental.rollout.sampler", LoadInfo)()

    # --- both ----------------------------------------------------------------------------------

    def _generated(self, rows: list[np.ndarray], seed: Any, **settings: Any) -> GenerationResult:
        settings = {name: value for name, value in settings.items() if value is not None}
        if settings.get("top_k", 0) < 0:  # all of them
            del settings["top_k"]
        settings |= {"do_sample": True, "logprobs": 0, "seed": _number(seed)}
        return generate(self.model, rows, **settings, **self._arguments)

    def _answers(self, result: GenerationResult) -> list[tuple[np.ndarray, np.ndarray, str]]:
        """Ids without a stop token, their log-probabilities and why they ended."""
        told, found = result.logprobs or [], []
        for ids, some, reason in zip(result.tokens, told, result.finish_reason, strict=True):
            count = len(ids) - (reason == "eos")
            found.append((ids[:count], some.processed[:count], TUNIX_REASONS.get(reason, reason)))
        return found

    def _ids(self, prompt: Any) -> np.ndarray:
        return self.tokenize(prompt) if isinstance(prompt, str) else np.asarray(prompt)

    def _decoded(self, ids: np.ndarray) -> str:
        return self.model.tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    @property
    def _pad_id(self) -> int:
        return self.model.stop_ids[0] if self.model.stop_ids else 0


def _settings_of(request: Any) -> tuple[tuple[str, Any], ...]:
    """What a request asks for, in our names."""
    asked = getattr(request, "sampling_params", None)

    def value(name: str, default: Any) -> Any:
        return getattr(asked, name, default)

    if value("return_logits", False):
        raise NotSupported("return_logits is not supported: tokens, text and log-probabilities")
    check(value("beam_size", None) in (None, 1), "beam_size", value("beam_size", None), "None")
    found = {
        "max_new_tokens": value("max_tokens", 64), "temperature": value("temperature", 1.0),
        "top_p": value("top_p", None), "top_k": value("top_k", None),
        "seed": _number(value("seed", None)),
        "return_logprobs": bool(value("return_logprobs", False)),
    }  # fmt: skip
    return tuple(found.items())


def _number(seed: Any) -> int:
    """Of a request's seed; none is 0."""
    found = GenerationConfig(seed=0 if seed is None else seed_of(seed)).seed
    assert isinstance(found, int)  # seed_of takes one
    return found
