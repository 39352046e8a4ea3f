"""Rows of an embedding kept in its matmul's form: `ids [T]`, `w [D, V]` -> `[T, D]`, so that a tied head shares it."""
