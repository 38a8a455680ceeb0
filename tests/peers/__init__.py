"""Other trainers on our work, timed or trained, in environments of their own."""
