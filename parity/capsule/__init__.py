"""One side of a pair is recorded in a folder, a capsule, and the other side is judged by it on another machine."""
