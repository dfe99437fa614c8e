"""What `peers.py` runs beside streamspec: how engines are installed, fed, spoken to and compared."""
