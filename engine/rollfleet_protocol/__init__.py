"""Wire models between operator, guard and launcher: the only package that both sides import. Pydantic only."""
