"""Figures and answers as people read them: tables in a terminal, a page, JSON, the summary of a job."""
