"""What several processes that compute together decide by, where each has figures of its own.

They must run the same programs in the same order, or they wait for each other forever: what
depends on a clock or on a file of one machine is decided by process 0.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jlookahead.model import Params

_MAX_BYTES = 4096


def of_first_process(value: Any, params: Params) -> Any:
    """The value that process 0 has.

    Args:
        value: what JSON can hold, in no more than 4 kB; tuples may come back as lists.
        params: whose devices compute. If all of them belong to this process, it asks nobody.
    """
    leaves = jax.tree.leaves(params)
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return value
    text = json.dumps(value).encode().ljust(_MAX_BYTES)
    return json.loads(multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8)).tobytes())
