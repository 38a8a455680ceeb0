"""From scored groups to an update: batch, packing, step, optimizer, critic, learner."""
