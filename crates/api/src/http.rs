//! Parts of HTTP that the agent's and the controller's API share.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::problem::{Problem, ProblemKind};

/// Answer to a request.
pub(crate) type Answer = Result<Response, Problem>;

/// Calls a function that may block, on a thread where that is allowed.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        tracing::error!(%error, "a request ended in a panic");
        Err(Problem::new(
            ProblemKind::Internal,
            "the daemon failed while it worked on this request",
            "see its log; please report it as a bug",
        ))
    })
}

/// Returns the answer to a path that does not exist; `page` of the manual lists those that do.
pub(crate) fn no_such_path(request: &Request, page: &'static str) -> Problem {
    Problem::new(
        ProblemKind::NotFound,
        format!("{} does not exist", request.uri().path()),
        format!("see the list of paths in {page}; client and daemon may be of different versions"),
    )
}

/// Returns the answer to a method that a path does not have.
pub(crate) fn no_such_method(request: &Request, page: &'static str) -> Response {
    let text = format!("{} cannot be used on {}", request.method(), request.uri().path());
    let problem = Problem::new(ProblemKind::BadRequest, text, format!("see the list of paths in {page}"));
    (StatusCode::METHOD_NOT_ALLOWED, axum::Json(problem)).into_response()
}

/// Returns metrics in the text format of Prometheus.
pub(crate) fn metrics(text: String) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// Returns a value as JSON.
pub(crate) fn json<T: Serialize>(status: StatusCode, value: &T) -> Answer {
    match serde_json::to_vec(value) {
        Ok(body) => Ok((status, [(header::CONTENT_TYPE, "application/json")], body).into_response()),
        Err(error) => Err(Problem::caused_by(ProblemKind::Internal, &error, "please report it as a bug")),
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, axum::Json(self)).into_response()
    }
}

/// A request's body, parsed as JSON whatever its content type is. Errors are returned as a [`Problem`].
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, shared: &S) -> Result<Self, Problem> {
        let bytes = Bytes::from_request(request, shared).await.map_err(|rejection| {
            Problem::new(ProblemKind::BadRequest, rejection.body_text(), "send less than 2 MB")
        })?;
        serde_json::from_slice(&bytes).map(Self).map_err(|error| {
            let text = format!("the request is invalid: {error}");
            Problem::new(ProblemKind::BadRequest, text, "client and daemon may be of different versions")
        })
    }
}
