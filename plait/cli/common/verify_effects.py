"""What `plait verify` writes of the effect that a cell is there for: how often it happened, or not."""

HAPPENED = {
    "failed_steps": "steps failed",
    "preemptions": "preemptions",
    "swaps": "swaps",
    "hit_tokens": "tokens from the cache",
    "launched_ahead": "steps launched ahead",
    "host_hits": "snapshots from host memory",
    "disk_reads": "files from the disk",
    "restarts": "restarts",
}
NOTHING = {
    "failed_steps": "no step failed",
    "preemptions": "nothing was preempted",
    "swaps": "nothing was swapped",
    "launched_ahead": "no step was launched ahead",
    "hit_tokens": "nothing came from the cache",
    "drafted": "nothing was drafted",
    "accepted": "no draft token was accepted",
    "host_hits": "nothing came from host memory",
    "disk_reads": "nothing came from the disk",
    "restarts": "nothing was left to go on with",
}
