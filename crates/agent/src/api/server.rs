//! The HTTP side: routes, the socket, and the threads that tokio lives on.
