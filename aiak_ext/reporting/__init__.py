"""`aiak-ext report`: a finished run's metrics as one HTML page."""
