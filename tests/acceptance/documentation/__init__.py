"""The pages of the documentation as programs: their code, and what each page's reader brings along."""
