"""Several servers as one: which replica gets a request. Pure accounting; it loads neither torch nor Ray.

`resume_points` is the replica's side: what its engine reports of its cache, as bounded messages.
`routing_table` is the gateway's side: what replicas reported, and a replica for each request. `costs` has the
arithmetic of both. `scaling` is the policy for the number of replicas, by the work that waits.
`replica_metrics` joins the metrics of their engines in a gateway.
"""
