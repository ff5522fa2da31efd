"""The draft rows as a forest: which token each follows, hence what it sees and where it stands.

A forest of R drafts is `parents [R]`: the draft before each one, -1 where that is the ordinary
row. Parents may stand anywhere; a draft sees itself and its ancestors.
"""

from __future__ import annotations

import heapq

import jax
import jax.numpy as jnp
import numpy as np


def chain_parents(num_chains: int, length: int) -> np.ndarray:
    """`[R]`, `num_chains` chains of `length`: `[-1, 0, 1, -1, 3, 4]` for two of three."""
    index = np.arange(num_chains * length, dtype=np.int32)
    return np.where(index % max(length, 1) == 0, np.int32(-1), index - 1)


def ancestry(parents: jax.Array) -> jax.Array:
    """`[B, R, R]` bool, True where draft j is draft i or an ancestor of it, for `parents [B, R]`.

    Doubles the distance looked back: log2(R) steps for a forest of any depth.
    """
    batch, num_drafts = parents.shape
    none = num_drafts  # one more row, the ordinary row's, which has no ancestors
    ahead = jnp.where(parents < 0, none, parents)
    ahead = jnp.pad(ahead, ((0, 0), (0, 1)), constant_values=none)
    seen = jnp.broadcast_to(jnp.eye(none + 1, none, dtype=bool), (batch, none + 1, none))
    for _ in range(max(num_drafts - 1, 0).bit_length()):
        seen |= jnp.take_along_axis(seen, ahead[..., None], axis=1)
        ahead = jnp.take_along_axis(ahead, ahead, axis=1)
    return seen[:, :num_drafts]


def rank_tree(num_nodes: int, probabilities: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The most likely nodes of a tree in which the k-th best child has `probabilities[k]`.

    A node's weight is the product of the probabilities on its path, and nodes come by falling
    weight: any leading part is the best tree of its size, with parents before children.

    Args:
        num_nodes: R.
        probabilities: by rank, falling, below 1.

    Returns:
        parents `[R]` and the rank `[R]` of every node among its siblings.
    """
    parents, ranks = np.zeros(num_nodes, np.int32), np.zeros(num_nodes, np.int32)
    queue = [(-probabilities[0], -1, 0, 1.0)]  # (-weight, parent, rank, weight of the parent)
    for node in range(num_nodes):
        weight, parents[node], ranks[node], above = heapq.heappop(queue)
        heapq.heappush(queue, (weight * probabilities[0], node, 0, -weight))
        sibling = int(ranks[node]) + 1
        if sibling < len(probabilities):
            heapq.heappush(
                queue, (-above * probabilities[sibling], int(parents[node]), sibling, above)
            )
    return parents, ranks
