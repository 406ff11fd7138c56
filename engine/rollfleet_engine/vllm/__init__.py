"""Everything that runs inside real vLLM: the transfer back end, the workers' extension and the guard's adapter."""
