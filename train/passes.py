"""Forward passes over a batch: log-probabilities, entropies and values at the response slots."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from train.attention import borders
from train.models import position_ids
from train.packing import shares
from train.rollout.batch import Batch
from train.world import ALONE, World


@dataclass(frozen=True)
class Part:
    """A micro-batch on the device: b trajectories with n response tokens in w slots."""

    rows: Int[Tensor, " b"]
    inputs: dict[str, Any]
    """A model's arguments: the tokens, padded [b, L] or packed [1, N], and where they belong."""
    states: Int[Tensor, " n"]
    """Where in the model's flattened output each response token is predicted."""
    targets: Int[Tensor, " n"]
    """The response tokens."""
    response_mask: Bool[Tensor, "b w"]

    def of(self, x: Tensor) -> Tensor:
        """These rows of a tensor [B] or [B, T], trimmed, on the device."""
        x = x[self.rows]
        return (x if x.ndim == 1 else x[:, : self.response_mask.shape[1]]).to(self.targets.device)

    def slots(self, x: Float[Tensor, " n"]) -> Float[Tensor, "b w"]:
        """A number for each response token put into its slot, 0 elsewhere."""
        return torch.zeros_like(self.response_mask, dtype=x.dtype).masked_scatter(
            self.response_mask, x
        )


def parts(
    batch: Batch,
    rows: Int[Tensor, " rows"],
    *,
    model: nn.Module,
    packed: bool,
    budget: int,
    device: torch.device,
    world: World = ALONE,
) -> Iterator[Part]:
    """This process's micro-batches; every process has the same number of them.

    One that has no trajectory left for a micro-batch gets the shortest one with nothing in its
    mask: it takes part in the collective operations and changes nothing.

    Args:
        batch: The step's trajectories.
        rows: Which of them.
        model: The language model or trunk that will read them.
        packed: Without padding, one sequence after the other; otherwise padded.
        budget: Prompt and response slots of one part, padding included; a longer row stands alone.
        device: Where the parts go.
        world: The processes that share the rows.
    """
    lengths = batch.attention_mask[rows].sum(1)
    mine: Sequence[Sequence[int]]
    if packed:
        mine = shares(lengths.tolist(), ranks=world.size, budget=budget)[world.rank]
    else:
        mine = _padded_shares(batch, rows, budget=budget, world=world)
    cut = _packed if packed else _padded
    for chosen in mine:
        here = rows[torch.tensor(chosen, dtype=torch.int64)]
        mask = batch.response_mask[here]
        if not chosen:
            here = rows[lengths.argmin()][None]
            mask = torch.zeros_like(batch.response_mask[here])
        yield cut(batch, here, mask, model, device)


def values_of(critic: nn.Module, part: Part) -> Float[Tensor, "b w"]:
    """V before each response token of a part: read where the token before it stands.

    Args:
        critic: A `Critic`, or a wrapper of one.
        part: A micro-batch.
    """
    values: Tensor = critic(**part.inputs, use_cache=False)
    return part.slots(values.flatten()[part.states])


@torch.no_grad()
def all_values(critic: nn.Module, batch: Batch, cut: Iterable[Part]) -> Float[Tensor, "B T"]:
    """`values_of` for the parts of a batch, on the CPU; 0 in the rows of no part."""
    values = torch.zeros(batch.response_mask.shape)
    for part in cut:
        found = values_of(critic, part)
        values[part.rows, : found.shape[1]] += found.cpu()
    return values


def _packed(
    batch: Batch,
    rows: Int[Tensor, " b"],
    mask: Bool[Tensor, "b T"],
    model: nn.Module,  # noqa: ARG001  (a cut takes it)
    device: torch.device,
) -> Part:
    real = batch.attention_mask[rows].bool()
    lengths = real.sum(1)
    # The place of every real slot in the packed sequence.
    place = (real.flatten().cumsum(0) - 1).view_as(real)
    tokens = batch.input_ids[rows][real]
    return Part(
        rows=rows,
        inputs={
            "input_ids": tokens[None].to(device),
            "position_ids": position_ids(real)[real][None].to(device),
            **{
                name: entry.to(device) if isinstance(entry, Tensor) else entry
                for name, entry in borders(lengths).items()
            },
        },
        states=(place[:, batch.prompt_width :][mask] - 1).to(device),
        targets=batch.response_ids[rows][mask].to(device),
        response_mask=_trimmed(mask).to(device),
    )


def _padded(
    batch: Batch,
    rows: Int[Tensor, " b"],
    mask: Bool[Tensor, "b T"],
    model: nn.Module,
    device: torch.device,
) -> Part:
    """These rows, with only so many prompt and response slots as the longest needs."""
    P = batch.prompt_width
    prompt = int(batch.attention_mask[rows, :P].sum(1).max())
    columns = slice(P - prompt, P + max(int(batch.lengths[rows].max()), 1))
    attention_mask = batch.attention_mask[rows, columns].to(device)
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids[rows, columns].to(device),
        "attention_mask": attention_mask,
    }
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = position_ids(attention_mask)
    place = torch.arange(attention_mask.numel()).view(attention_mask.shape)
    trimmed = _trimmed(mask)
    return Part(
        rows=rows,
        inputs=inputs,
        states=(place[:, prompt : prompt + trimmed.shape[1]][trimmed] - 1).to(device),
        targets=batch.response_ids[rows][mask].to(device),
        response_mask=trimmed.to(device),
    )


def _trimmed(mask: Bool[Tensor, "b T"]) -> Bool[Tensor, "b w"]:
    return mask[:, : max(int(mask.sum(1).max()), 1)]


def _padded_shares(
    batch: Batch, rows: Int[Tensor, " rows"], *, budget: int, world: World
) -> Sequence[Sequence[int]]:
    """Rows of similar length together, dealt out in turn to the processes."""
    prompt = batch.attention_mask[rows, : batch.prompt_width].sum(1)
    response = batch.lengths[rows]
    order = torch.argsort(prompt + response, stable=True).tolist()
    groups: list[list[int]] = []
    widest = (0, 0)
    for row in order:
        wider = max(widest[0], int(prompt[row])), max(widest[1], int(response[row]))
        if groups and (len(groups[-1]) + 1) * sum(wider) <= budget:
            groups[-1].append(row)
        else:
            groups.append([row])
            wider = int(prompt[row]), int(response[row])
        widest = wider
    groups += [[] for _ in range(-len(groups) % world.size)]
    return groups[world.rank :: world.size]
