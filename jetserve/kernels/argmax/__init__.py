"""The first index of the greatest of every row: `[S, V]` -> int32 `[S]`; -1 where that is not a finite number."""
