//! Client of HTTP on a Unix socket: blocking, with one connection for each request.

use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::Runtime;

use super::problem::Problem;

/// Size of the longest answer that is read, in bytes. Reports of many rounds are the largest.
const ANSWER_BYTES: usize = 64 << 20;

/// Longest time in which a running daemon answers a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// A client of one daemon.
#[derive(Debug)]
pub(crate) struct HttpClient {
    socket: PathBuf,
    is_controller: bool,
    runtime: Runtime,
}

/// Reason for which a request has no valid answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No agent listens on the socket.
    #[error(
        "no agent answers at {socket}; start it with `whimbrel agent --config /etc/whimbrel/agent.toml` (or its \
         systemd unit), or name its socket with --socket", socket = socket.display())]
    NoAgent {
        /// Path of the socket.
        socket: PathBuf,
        /// Error of the connection.
        source: io::Error,
    },
    /// No controller listens on the socket.
    #[error(
        "no controller answers at {socket}; start it with `whimbrel controller --config \
         /etc/whimbrel/controller.toml` (or its systemd unit), run this on its host, or name its socket with \
         --controller", socket = socket.display())]
    NoController {
        /// Path of the socket.
        socket: PathBuf,
        /// Error of the connection.
        source: io::Error,
    },
    /// The user may not open the socket.
    #[error(
        "no permission to open the socket {socket}; use the account that its daemon runs as (root)",
        socket = socket.display()
    )]
    Forbidden {
        /// Path of the socket.
        socket: PathBuf,
        /// Error of the connection.
        source: io::Error,
    },
    /// The connection ended before the answer.
    #[error("the connection was closed before the answer; the request may have been carried out")]
    Lost(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The daemon refused the request.
    #[error(transparent)]
    Problem(#[from] Problem),
    /// The answer cannot be decoded.
    #[error("the answer is invalid; do client and daemon have different versions?")]
    Answer(#[source] serde_json::Error),
    /// The request cannot be encoded.
    #[error("the request cannot be encoded")]
    Request(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The client has no threads or descriptors left.
    #[error("cannot start the client")]
    Runtime(#[source] io::Error),
}

impl HttpClient {
    /// Creates a client of the agent, or of the controller, behind a socket. Sends nothing yet.
    pub(crate) fn new(socket: &Path, is_controller: bool) -> Result<Self, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(ClientError::Runtime)?;
        Ok(Self { socket: socket.to_owned(), is_controller, runtime })
    }

    /// Returns the documents of a path that sends them line by line.
    pub(crate) fn lines<T: DeserializeOwned>(&self, path: &str) -> Result<Lines<'_, T>, ClientError> {
        let body = self.runtime.block_on(async {
            let response = self.send(&Method::GET, path, Bytes::new()).await?;
            if response.status().is_success() {
                Ok(response.into_body())
            } else {
                Err(problem(response.status(), &whole(response).await?))
            }
        })?;
        Ok(Lines { runtime: &self.runtime, body: Some(body), pending: Vec::new(), kind: PhantomData })
    }

    pub(crate) fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let body = self.exchange(&Method::DELETE, path, Bytes::new())?;
        serde_json::from_slice(&body).map_err(ClientError::Answer)
    }

    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let body = self.exchange(&Method::GET, path, Bytes::new())?;
        serde_json::from_slice(&body).map_err(ClientError::Answer)
    }

    pub(crate) fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<T, ClientError> {
        let request = serde_json::to_vec(request).map_err(|error| ClientError::Request(error.into()))?;
        let body = self.exchange(&Method::POST, path, request.into())?;
        serde_json::from_slice(&body).map_err(ClientError::Answer)
    }

    fn exchange(&self, method: &Method, path: &str, body: Bytes) -> Result<Bytes, ClientError> {
        self.runtime.block_on(async {
            let response = self.send(method, path, body).await?;
            let status = response.status();
            let body = whole(response).await?;
            if status.is_success() { Ok(body) } else { Err(problem(status, &body)) }
        })
    }

    async fn send(
        &self,
        method: &Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, ClientError> {
        let stream = tokio::time::timeout(CONNECT, tokio::net::UnixStream::connect(&self.socket))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(|source| {
                let socket = self.socket.clone();
                match source.kind() {
                    io::ErrorKind::PermissionDenied => ClientError::Forbidden { socket, source },
                    _ if self.is_controller => ClientError::NoController { socket, source },
                    _ => ClientError::NoAgent { socket, source },
                }
            })?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "whimbrel")
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|error| ClientError::Request(error.into()))?;
        sender.send_request(request).await.map_err(lost)
    }
}

/// Documents that arrive line by line.
#[derive(Debug)]
pub struct Lines<'a, T> {
    runtime: &'a Runtime,
    body: Option<Incoming>,
    pending: Vec<u8>,
    kind: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> Iterator for Lines<'_, T> {
    type Item = Result<T, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let rest = self.pending.split_off(end + 1);
                let line = std::mem::replace(&mut self.pending, rest);
                return Some(serde_json::from_slice(&line).map_err(ClientError::Answer));
            }
            let body = self.body.as_mut()?;
            match self.runtime.block_on(body.frame()) {
                Some(Ok(frame)) => {
                    self.pending.extend_from_slice(frame.data_ref().map_or(&[], |data| &data[..]));
                }
                Some(Err(error)) => {
                    self.body = None;
                    return Some(Err(lost(error)));
                }
                None => self.body = None,
            }
        }
    }
}

async fn whole(response: Response<Incoming>) -> Result<Bytes, ClientError> {
    let body = http_body_util::Limited::new(response.into_body(), ANSWER_BYTES);
    body.collect().await.map(http_body_util::Collected::to_bytes).map_err(ClientError::Lost)
}

fn problem(status: StatusCode, body: &[u8]) -> ClientError {
    match serde_json::from_slice::<Problem>(body) {
        Ok(problem) => problem.into(),
        Err(error) => {
            tracing::debug!(%status, "an error without a problem document");
            ClientError::Answer(error)
        }
    }
}

fn lost(error: hyper::Error) -> ClientError {
    ClientError::Lost(error.into())
}
