//! The daemon: listens for agents and users, and lets time pass.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

use api::{Server, ServerError};
use link::{Endpoint, Identity, IdentityError, Listener, ListenerHandle, Security};
use store::fleet::FleetStoreError;
use tracing::info;

use crate::config::ControllerConfig;
use crate::coordinator::{Coordinator, lock};
use crate::sessions;
use crate::user_api::UserApi;

/// Time between two looks at what is not stored yet.
const TICK: Duration = Duration::from_millis(200);
/// Number of these looks in a second.
const TICKS_PER_S: u64 = 5;

/// Reason for which a controller cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// The records cannot be used.
    #[error(transparent)]
    Store(#[from] FleetStoreError),
    /// Certificate, key or authority cannot be used.
    #[error("the files under [tls] cannot be used")]
    Identity(#[from] IdentityError),
    /// The listener for agents cannot be opened.
    #[error("cannot listen for agents")]
    Listen(#[from] link::BindError),
    /// The API cannot be served.
    #[error("cannot serve the API")]
    Api(#[from] ServerError),
    /// A thread cannot be started.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
}

/// A running controller. Dropping it ends its listeners; evacuations go on when the next one is started.
pub struct Controller {
    shared: Weak<Mutex<Coordinator>>,
    ended: Arc<AtomicBool>,
    serving: ListenerHandle,
    _api: Server,
}

impl Controller {
    /// Starts a controller, whose term is larger than all terms in its records, and than `seen_term`.
    pub fn start(config: ControllerConfig, seen_term: u64) -> Result<Self, ControllerError> {
        let endpoint = endpoint(&config)?;
        let listener = Listener::bind(endpoint, &config.listen.to_string())?;
        let socket = config.api_socket.clone();
        let coordinator = Coordinator::open(config, seen_term)?;
        let (term, signal) = (coordinator.term, coordinator.signal().clone());
        let shared = Arc::new(Mutex::new(coordinator));
        let ended = Arc::new(AtomicBool::new(false));
        let weak = Arc::downgrade(&shared);
        let ticking = (Arc::downgrade(&shared), Arc::clone(&ended));
        thread::Builder::new()
            .name("ticker".to_owned())
            .spawn(move || tick(&ticking.0, &ticking.1))
            .map_err(ControllerError::Thread)?;
        let agents = Arc::clone(&shared);
        let address = listener.address();
        let serving = listener.serve(move |arrival| sessions::arrival(&agents, arrival))?;
        let api = api::serve_fleet(&socket, Arc::new(UserApi::new(shared, signal)))?;
        info!(%address, api = %socket.display(), term, "ready");
        Ok(Self { shared: weak, ended, serving, _api: api })
    }

    /// Returns the address for agents, with the port that the system has chosen.
    pub fn address(&self) -> SocketAddr {
        self.serving.address()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        if let Some(shared) = self.shared.upgrade() {
            lock(&shared).end();
        }
    }
}

/// Lets time pass for the coordinator, as long as there is one.
fn tick(shared: &Weak<Mutex<Coordinator>>, ended: &AtomicBool) {
    for number in 0_u64.. {
        thread::sleep(TICK);
        let Some(shared) = shared.upgrade().filter(|_| !ended.load(Ordering::Acquire)) else { return };
        lock(&shared).tick(number.is_multiple_of(TICKS_PER_S));
    }
}

/// Checks the files under `[tls]`. Changes nothing.
pub fn check_identity(config: &ControllerConfig) -> Result<(), ControllerError> {
    Ok(endpoint(config).map(drop)?)
}

fn endpoint(config: &ControllerConfig) -> Result<Endpoint, IdentityError> {
    let security = match &config.tls {
        None => Security::Plain,
        Some(files) => {
            let identity = Identity::load(files)?;
            identity.check(&config.name)?;
            Security::Tls(identity)
        }
    };
    Ok(Endpoint::new(config.name.clone(), security))
}
