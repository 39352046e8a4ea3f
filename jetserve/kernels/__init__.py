"""Operations with several implementations: one folder an operation, one file an implementation."""
