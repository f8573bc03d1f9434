"""torch's store on the socket that the first node's runner has bound, and how torchrun and accelerate join it."""
