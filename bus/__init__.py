"""NATS JetStream: connection, embedded server, streams, records, codec, leases and ledger. Knows nothing of RL."""
