"""The reducer: what adds contributions to one mean, the same bytes wherever it runs."""
