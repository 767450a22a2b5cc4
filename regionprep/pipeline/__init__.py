"""Images to tables: one stage a module, one driver that knows shards."""
