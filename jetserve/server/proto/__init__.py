"""The gRPC protocol: `jetstream.proto`, and what `make proto` generates from it."""
