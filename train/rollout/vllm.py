"""Rollouts by vLLM inside the trainer's own processes (colocated): tokens in, tokens out.

vLLM is an engine of its own with weights of its own, so three things are made sure of here. It
samples from the policy that is trained: no habit of a generation config, and the given end tokens
alone. It reports that policy's log-probabilities. And `sync` reaches every weight that it computes
with; `train.rollout.guard` measures whether it did.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from train.config import Sampling
from train.models import ModelError, end_of_sequence, padding_of
from train.rollout.batch import Responses
from train.world import ALONE, World, WorldError

Found = TypeVar("Found")


class VllmBackend:
    """vLLM, one engine in each process, or one over `tensor_parallel` neighbouring processes.

    Every process calls every verb with the same arguments and gets the whole result; each group of
    processes that holds one engine generates a share of it.

    Attributes:
        model: The architecture without weights, for whoever asks for its names and sizes.
        end_tokens: Tokens that end a response.
        pad_id: Fills batches; vLLM itself needs no padding.
        max_model_len: Positions of a sequence, prompt and response together.
        version: Updates of the policy that the weights have seen.
        can_sleep: Whether the platform can give memory back; vLLM's CPU build cannot.
    """

    def __init__(
        self,
        path: str,
        *,
        end_tokens: Sequence[int],
        pad_id: int = 0,
        dtype: str = "float32",
        batch_size: int = 256,
        tensor_parallel: int = 1,
        memory_share: float = 0.5,
        max_model_len: int | None = None,
        world: World = ALONE,
    ) -> None:
        """Starts vLLM on the model at a path.

        Args:
            path: A folder that `save_pretrained` wrote, or a hub id; no tokenizer is needed.
            end_tokens: Tokens that end a response.
            pad_id: Handed on.
            dtype: Of the weights; the trainer's own, for the least mismatch.
            batch_size: Responses generated side by side.
            tensor_parallel: Processes that share one engine; their ranks follow each other.
            memory_share: Of the device's memory, for weights and KV cache; on a CPU, which the
                trainer fills as well, for the KV cache alone.
            max_model_len: Positions of a sequence; the model's own number where that is smaller or
                where this is None.
            world: The processes of the run; their process group must be there before vLLM is.

        Raises:
            ModelError: vLLM cannot run this model here.
            WorldError: The processes cannot be divided like this, or no longer reach each other.
        """
        if world.size % tensor_parallel:
            raise WorldError(
                f"rollout.tensor_parallel: {world.size} processes cannot be divided into groups of "
                f"{tensor_parallel}"
            )
        self.model = _skeleton(path)
        self.end_tokens = list(end_tokens)
        self.pad_id = pad_id
        self.version = 0
        self.world, self.tensor_parallel = world, tensor_parallel
        self._asleep: set[str] = set()
        self._discarded = False
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        # Scoring a whole sequence makes vLLM generate one token after it.
        wanted = max_model_len and max_model_len + 1

        _prepare_environment()
        try:
            from vllm import LLM, SamplingParams
            from vllm.platforms import current_platform
        except ImportError as error:
            raise ModelError(f"rollout.backend: vllm cannot be imported: {error}") from error
        self._sampling_params: Any = SamplingParams
        on_cpu = self._repacks = current_platform.is_cpu()
        memory = current_platform.get_device_total_memory()
        self.can_sleep = current_platform.is_sleep_mode_available()
        try:
            with _random_state_kept():
                self.llm: Any = LLM(
                    path,
                    dtype=dtype,
                    tensor_parallel_size=tensor_parallel,
                    distributed_executor_backend="external_launcher" if world.size > 1 else "uni",
                    gpu_memory_utilization=memory_share,
                    kv_cache_memory_bytes=int(memory_share * memory) if on_cpu else None,
                    max_num_seqs=batch_size,
                    max_model_len=min((n for n in (wanted, limit) if n), default=None),
                    enable_sleep_mode=self.can_sleep,
                    enforce_eager=on_cpu,
                    # A prompt cut in two makes vLLM rewind the request's random stream, which the
                    # streams of a CPU cannot.
                    enable_chunked_prefill=False if on_cpu else None,
                    # What the model's authors put there (a repetition penalty, say) would bias.
                    generation_config="vllm",
                    logprobs_mode="raw_logprobs",
                    skip_tokenizer_init=True,
                    use_tqdm_on_load=False,
                )
                self._output_layers = _output_layers(self.llm)
                self._run([[0]], [self._params(seed=0, max_tokens=1)])  # what cannot run fails now
        except (ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"model.path {path}: vLLM cannot run it here: {reason}") from error
        self._positions: int = self.llm.model_config.max_model_len
        self.max_model_len = min(max_model_len or self._positions, self._positions)
        world.check()

    @classmethod
    def open(cls, path: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Self:
        """The backend for the model at a path, with the end and padding tokens that belong to it.

        Args:
            path: Of the model.
            tokenizer: The model's.
            settings: As in the constructor.

        Raises:
            ModelError: vLLM cannot run this model here.
            WorldError: The processes cannot be divided like this, or no longer reach each other.
        """
        model = _skeleton(path)
        return cls(
            path,
            end_tokens=end_of_sequence(model, tokenizer),
            pad_id=padding_of(model, tokenizer),
            **settings,
        )

    @torch.no_grad()
    def sync(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Streams every parameter through vLLM's own reload.

        vLLM holds on to a layer's tensors until it has all of them (q, k and v become one), so
        those that it was handed must stay as they are until this returns.

        Args:
            weights: By transformers' names, each once.
            version: Updates of the policy that they have seen.

        Raises:
            RuntimeError: A parameter is unknown here, or one was not sent.
        """
        self._wake("weights")
        missing = {name for name, _ in self.model.named_parameters()}

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name not in missing:
                    raise RuntimeError(f"weight sync: the rollout model has no parameter {name}")
                missing.remove(name)
                yield name, tensor

        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": counted()})
        if missing:
            raise RuntimeError(f"weight sync: never received {sorted(missing)}")
        if self._repacks:
            self.llm.apply_model(_pack_output_layers)
        self._discarded = False
        # Keys and values of the old weights.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("weight sync: vLLM still generates and keeps its prefix cache")
        self.version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> Responses:
        """As `Backend.generate`.

        A response depends on its prompt, its seed and the weights, not on its batch, up to the
        rounding of the matrix products (float32: about 1e-6 of a probability; in bfloat16 the
        rounding may now and then decide a token).

        Args:
            prompts: Tokens of each.
            seeds: One each, below 2^63: vLLM holds them in 64 bits with sign, -1 meaning none.
            sampling: Temperature, top-p and length.

        Raises:
            ValueError: A prompt and its response do not fit into `max_model_len`.
            RuntimeError: The weights were discarded in `sleep` and no `sync` has come since.
        """
        longest = max(map(len, prompts), default=0)
        _require_room(longest + sampling.max_tokens, self.max_model_len)
        self.wake()
        self._set_temperature(sampling.temperature)

        def work(mine: Sequence[tuple[Sequence[int], int]]) -> list[tuple[list[int], list[float]]]:
            params = [
                self._params(
                    seed=seed,
                    top_p=sampling.top_p,
                    max_tokens=sampling.max_tokens,
                    stop_token_ids=self.end_tokens,
                    logprobs=0,  # that of the chosen token alone
                )
                for _, seed in mine
            ]
            found = [request.outputs[0] for request in self._run([p for p, _ in mine], params)]
            return [(list(one.token_ids), list(one.logprobs.logprobs)) for one in found]

        rows = self._spread(list(zip(prompts, seeds, strict=True)), work)
        return Responses(
            tokens=[tokens for tokens, _ in rows],
            log_probs=[log_probs for _, log_probs in rows],
            truncated=[not tokens or tokens[-1] not in self.end_tokens for tokens, _ in rows],
            version=self.version,
        )

    def log_probs_of(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        *,
        temperature: float,
    ) -> list[list[float]]:
        """As `Backend.log_probs_of`; every engine computes all of it.

        Raises:
            ValueError: A sequence does not fit into the engine.
            RuntimeError: The weights were discarded in `sleep` and no `sync` has come since.
        """
        whole = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
        _require_room(max(map(len, whole), default=0) + 1, self._positions)
        self.wake()
        self._set_temperature(temperature)
        params = self._params(max_tokens=1, prompt_logprobs=0)
        scored = self._run(whole, [params] * len(whole))
        # Of every token but the first, which nothing predicts.
        return [
            list(request.prompt_logprobs.logprobs[len(prompt) - 1 :])
            for prompt, request in zip(prompts, scored, strict=True)
        ]

    def sleep(self, *, discard_weights: bool = False) -> None:
        """Gives the device's memory to the trainer until the next `sync` or `generate`.

        The KV cache is dropped, the weights move to the machine's memory. vLLM's CPU build has no
        sleep mode: there this does nothing (`can_sleep`).

        Args:
            discard_weights: Drop the weights too; the next call must then be `sync`.
        """
        if self.can_sleep and not self._asleep:
            self.llm.sleep(level=2 if discard_weights else 1)
            self._asleep = {"weights", "kv_cache"}
            self._discarded = discard_weights

    def wake(self) -> None:
        """Takes the memory back; `sync`, `generate` and `log_probs_of` do so themselves.

        Raises:
            RuntimeError: The weights were discarded and no `sync` has come since.
        """
        if self._discarded:
            raise RuntimeError("the rollout engine slept without its weights: sync them first")
        self._wake("weights", "kv_cache")

    def _wake(self, *wanted: str) -> None:
        tags = [tag for tag in wanted if tag in self._asleep]
        if tags:
            self.llm.wake_up(tags=tags)
            self._asleep -= set(tags)

    def _params(self, **settings: Any) -> Any:
        # `ignore_eos`: the end tokens are ours to name. The temperature is in the logits already.
        return self._sampling_params(
            temperature=1.0, ignore_eos=True, detokenize=False, flat_logprobs=True, **settings
        )

    def _run(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> Any:
        if not prompts:
            return []
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with _random_state_kept():
            return self.llm.generate(asked, list(params), use_tqdm=False)

    def _set_temperature(self, temperature: float) -> None:
        """Puts the temperature into the model's own scale of the logits.

        vLLM reports log-probabilities either before temperature and top-p ("raw") or after both
        ("processed"). The policy's are in between. With logits scaled like this the raw ones are.
        """
        for layer, scale in self._output_layers:
            layer.scale = scale / temperature

    def _spread(
        self, items: Sequence[Any], work: Callable[[Sequence[Any]], list[Found]]
    ) -> list[Found]:
        """Work on the items, every n-th in each of n engines: long ones stand side by side."""
        engines = self.world.size // self.tensor_parallel
        mine = work(items[self.world.rank // self.tensor_parallel :: engines])
        whole: list[Any] = [None] * len(items)
        for engine, share in enumerate(self.world.gather(mine)[:: self.tensor_parallel]):
            whole[engine::engines] = share
        return whole


def _skeleton(path: str) -> PreTrainedModel:
    """The architecture at a path on the meta device: names, shapes and end tokens, no weights."""
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path {path}: no model can be loaded: {' '.join(str(error).split())}"
        ) from error
    with suppress(OSError):  # it may have none
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _require_room(needed: int, positions: int) -> None:
    if needed > positions:
        raise ValueError(
            f"rollout.max_model_len: the longest sequence takes {needed} positions, the rollout "
            f"engine has {positions}; raise it, or allow shorter prompts or responses"
        )


def _prepare_environment() -> None:
    """What vLLM reads from the environment, before it is imported."""
    # The weights come from this process, so the engine has to be in it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _random_state_kept() -> Any:
    # vLLM seeds, and on a CPU draws from, the generator that is the trainer's too.
    return torch.random.fork_rng(devices=[])


def _output_layers(llm: Any) -> list[tuple[Any, float]]:
    """vLLM's layers that make logits, each with the model's own scale."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def find(model: nn.Module) -> list[tuple[Any, float]]:
        layers = [layer for layer in model.modules() if isinstance(layer, LogitsProcessor)]
        return [(layer, layer.scale) for layer in layers]

    found: list[tuple[Any, float]] = llm.apply_model(find)[0]
    if not found:
        raise ValueError("its logits have no scale to put the temperature into")
    return found


def _pack_output_layers(model: nn.Module) -> None:
    """Packs output layers for the CPU's kernels again.

    A reload does so for every layer whose weights it loads. Tied ones are loaded as the embeddings,
    and the packed copy that the logits are computed with would stay the old one.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
