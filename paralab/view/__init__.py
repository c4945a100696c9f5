"""Pictures of reports: plotly figures, the HTML page, the Perfetto trace. One theme; torch-free."""
