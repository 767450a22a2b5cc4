"""Region features for image captioning: detect, extract, shard, train, caption, score."""
