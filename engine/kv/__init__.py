"""The paged KV cache: ids (`blocks`), hashes (`prefix`), one request's blocks (`manager`), tensors (`storage`)."""
