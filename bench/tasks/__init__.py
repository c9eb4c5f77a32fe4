"""Tasks that a model solves through `latentkv serve`, with one cache after another: what a smaller cache
costs in problems, not in nats. One program a task; the other files are their parts."""
