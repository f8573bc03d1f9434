"""In place of torch, whose import costs two seconds of a core, where the first node's runner serves a store for ranks
that never ask for it."""
