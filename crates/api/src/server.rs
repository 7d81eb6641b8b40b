//! The HTTP server: routes, the socket, and the threads of tokio.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use axum::Router;

use super::control::Control;
use super::fleet::{self, FleetControl};
use super::routes;

/// Time for requests under way to finish when the server ends.
const PATIENCE: Duration = Duration::from_secs(2);

/// Longest path of a Unix socket, in bytes: the kernel's `sun_path` with its closing zero.
const SOCKET_PATH_BYTES: usize = 107;

/// Reason for which the API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Another daemon answers on the socket.
    #[error(
        "another daemon serves {socket}; stop it, or give this one a different `api_socket`",
        socket = socket.display()
    )]
    InUse {
        /// Path of the socket.
        socket: PathBuf,
    },
    /// Something else is in the socket's place.
    #[error(
        "{socket} is there, and is no socket: choose another `api_socket`, or move the file away",
        socket = socket.display()
    )]
    NotASocket {
        /// Path of the socket.
        socket: PathBuf,
    },
    /// The path is longer than Unix sockets allow.
    #[error("the path {socket} is too long for a socket; choose an `api_socket` of at most 90 bytes", socket = socket.display())]
    TooLong {
        /// Path of the socket.
        socket: PathBuf,
    },
    /// The socket cannot be made.
    #[error(
        "cannot create the API's socket {socket}; check `api_socket` or `run_dir` in the configuration and \
         its permissions",
        socket = socket.display()
    )]
    Socket {
        /// Path of the socket.
        socket: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The threads cannot be started.
    #[error("cannot start the API's threads")]
    Threads(#[source] io::Error),
}

/// A running API. Dropping it ends it as [`Server::stop`] does.
#[derive(Debug)]
pub struct Server {
    socket: PathBuf,
    /// Device and inode of the socket: another agent's may be in its place by the end.
    identity: (u64, u64),
    end: watch::Sender<bool>,
    serving: Option<(Runtime, JoinHandle<()>)>,
}

/// Serves the agent's API on a Unix socket, on threads of its own, until the [`Server`] is stopped.
pub fn serve(socket: &Path, control: Arc<dyn Control>) -> Result<Server, ServerError> {
    serve_routes(socket, |ended| routes::router(control, ended))
}

/// Serves the controller's API in the same way.
pub fn serve_fleet(socket: &Path, control: Arc<dyn FleetControl>) -> Result<Server, ServerError> {
    serve_routes(socket, |ended| fleet::router(control, ended))
}

fn serve_routes(
    socket: &Path,
    routes: impl FnOnce(watch::Receiver<bool>) -> Router,
) -> Result<Server, ServerError> {
    let (listener, identity) = bind(socket)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("api")
        .enable_all()
        .build()
        .map_err(ServerError::Threads)?;
    let listener = {
        let _context = runtime.enter();
        listener
            .set_nonblocking(true)
            .and_then(|()| tokio::net::UnixListener::from_std(listener))
            .map_err(|source| ServerError::Socket { socket: socket.to_owned(), source })?
    };
    let (end, mut ended) = watch::channel(false);
    let router = routes(ended.clone());
    let serving = runtime.spawn(async move {
        let until = async move {
            // An error means that the sender is gone, which is an end as well.
            let _ = ended.wait_for(|end| *end).await;
        };
        if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(until).await {
            tracing::error!(%error, "the API's socket failed");
        }
    });
    Ok(Server { socket: socket.to_owned(), identity, end, serving: Some((runtime, serving)) })
}

impl Server {
    /// Returns the path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Stops the server: accepts no new requests, waits a moment for those under way, and removes the socket.
    pub fn stop(mut self) {
        self.end_now();
    }

    fn end_now(&mut self) {
        let Some((runtime, serving)) = self.serving.take() else { return };
        // The name is removed first, so that new clients learn that no server is there.
        if identity(&self.socket).is_ok_and(|identity| identity == self.identity) {
            let _ = fs::remove_file(&self.socket);
        }
        self.end.send_replace(true);
        let _ = runtime.block_on(async { tokio::time::timeout(PATIENCE, serving).await });
        runtime.shutdown_background();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end_now();
    }
}

/// Returns the device and the inode of a file.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

/// Confirms that nothing is in the socket's place, or a socket that a dead agent left behind.
fn check_place(socket: &Path) -> Result<(), ServerError> {
    let failed = |source| Err(ServerError::Socket { socket: socket.to_owned(), source });
    match fs::symlink_metadata(socket) {
        Ok(found) if found.file_type().is_socket() => {}
        Ok(_) => return Err(ServerError::NotASocket { socket: socket.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return failed(error),
    }
    match UnixStream::connect(socket) {
        Ok(_) => Err(ServerError::InUse { socket: socket.to_owned() }),
        Err(error) if [io::ErrorKind::ConnectionRefused, io::ErrorKind::NotFound].contains(&error.kind()) => {
            Ok(())
        }
        // A socket of another kind has an owner who may be alive.
        Err(error) => failed(error),
    }
}

/// Binds a socket that only its owner may open, and replaces one that a dead agent left behind. Returns it with its
/// device and inode.
///
/// The socket is made in a directory that no other user may enter, and is moved to its place once its mode is right: at
/// no moment can others connect to it.
fn bind(socket: &Path) -> Result<(UnixListener, (u64, u64)), ServerError> {
    let failed = |source| ServerError::Socket { socket: socket.to_owned(), source };
    let directory = socket.parent().unwrap_or(Path::new("/"));
    let private = directory.join(format!(".api-{}", std::process::id()));
    let first = private.join("s");
    if first.as_os_str().len().max(socket.as_os_str().len()) > SOCKET_PATH_BYTES {
        return Err(ServerError::TooLong { socket: socket.to_owned() });
    }
    check_place(socket)?;
    fs::create_dir_all(directory).map_err(failed)?;
    let _ = fs::remove_dir_all(&private);
    fs::DirBuilder::new().mode(0o700).create(&private).map_err(failed)?;
    let bound = UnixListener::bind(&first).and_then(|listener| {
        fs::set_permissions(&first, fs::Permissions::from_mode(0o600))?;
        let identity = identity(&first)?;
        fs::rename(&first, socket)?;
        Ok((listener, identity))
    });
    let _ = fs::remove_dir_all(&private);
    bound.map_err(failed)
}
