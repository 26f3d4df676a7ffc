"""What a request costs on a replica, in tokens of prompt, and where it goes while no replica reports.

    cost = tokens of the prompt computed there + tokens of prompts that wait there + 64 for each open reply

Every term is work before the first token, so that one unit does for all, and no threshold is needed. An open
reply makes each step a little longer: 16 to 64 tokens describe it, and much more spoils the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b

OPEN_REPLY_TOKENS = 64
# A home is left for another replica when it has this much more to do than the mean of all.
HOME_FACTOR, HOME_TOKENS = 1.25, 2048
MASK = (1 << 64) - 1


def count_missing(num_tokens: int, num_found: int) -> int:
    """Tokens of a prompt that a replica computes. The last one always: its logits are needed."""
    return num_tokens - min(num_found, max(num_tokens - 1, 0))


def weigh_load(waiting_tokens: int, open_replies: int) -> int:
    """What a replica has to do, in tokens of prompt."""
    return waiting_tokens + OPEN_REPLY_TOKENS * open_replies


def rank_homes(name: bytes, replicas: Iterable[str]) -> list[str]:
    """All replicas, in an order that depends on `name` alone (rendezvous hashing, Thaler and Ravishankar).

    A replica that comes or goes changes the first place of few names: those that it gets or had.
    """
    home = seed_name(name)
    return sorted(replicas, key=lambda replica: order_home(home, seed_name(replica.encode())))


def seed_name(name: bytes) -> int:
    """A number of 64 bits for a replica's name or a beginning's hash, the same in every gateway."""
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "big")


def order_home(home: int, replica: int) -> int:
    """The place of a replica in a beginning's order: the smallest comes first. Both are of `seed_name`.

    A mix of two numbers (SplitMix64's, Steele and others 2014) is ten times cheaper than a hash of each pair.
    """
    mixed = ((home ^ replica) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & MASK
    return mixed ^ mixed >> 31


def is_overloaded(load: float, mean: float) -> bool:
    """Whether a home has so much to do that another replica is better, though it has computed nothing."""
    return load > HOME_FACTOR * mean + HOME_TOKENS


def order_by_home(name: bytes, loads: Mapping[str, float]) -> list[str]:
    """Replicas in the order of `rank_homes`, overloaded ones behind the others. `loads`: in tokens."""
    mean = sum(loads.values()) / max(len(loads), 1)
    return sorted(rank_homes(name, loads), key=lambda replica: is_overloaded(loads[replica], mean))
