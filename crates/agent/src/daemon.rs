//! The daemon: holds the drivers of all migrations, answers peers and users, and resumes the migrations of a previous
//! agent.

mod connections;
mod control;
mod controller_link;
mod decisions;
mod dns_records;
mod drive;
mod driver_slot;
mod forecasts;
mod metrics;
mod receive;
mod recovery;
mod status;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use link::transport::TcpTransport;
use link::{Endpoint, Identity, IdentityError, Listener, ListenerHandle, Peer, Router, Settings, TlsFiles};
use proto::MigrationId;
use qemu::describe::redact_secrets;
use tracee::Injector;
use tracing::info;

use api::progress::Publisher;
use api::{self, Server, ServerError};
use controller_link::ControllerLink;
use host::Context;
use host::EmulatorCache;
pub use host::HelperProgram;
use host::MigrationTransport;
use host::config::{AgentRole, Config, Security};
use host::dns_keeper::DnsKeeper;
use host::fault::Faults;
use host::measurement::Measurements;
use host::name_locks::NameLocks;
use host::redirections::RedirectionReaper;
use host::templates::Templates;
use migrate::{destination, source};
use store::journal::{Journal, JournalError};
use store::registry::{Registry, RegistryError, SqliteRegistry, WitnessClient, WitnessServer};

/// Pause between two looks at the redirections of this host.
const REDIRECTION_PAUSE: Duration = Duration::from_secs(5);

/// Reason for which an agent cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The journal cannot be used.
    #[error("the journal cannot be used")]
    Journal(#[from] JournalError),
    /// The ownership registry cannot be used.
    #[error("the registry cannot be used")]
    Registry(#[from] RegistryError),
    /// Certificate, key or authority cannot be used.
    #[error("the files under [tls] cannot be used")]
    Identity(#[from] IdentityError),
    /// The listener for peers cannot be opened.
    #[error("cannot listen for peers")]
    Listen(#[from] link::BindError),
    /// The API cannot be served.
    #[error("cannot serve the API")]
    Api(#[from] ServerError),
    /// The thread for templates cannot be started.
    #[error("cannot start a thread to look for templates")]
    Templates(#[source] std::io::Error),
    /// The thread for redirections cannot be started.
    #[error("cannot start a thread for redirections")]
    Redirections(#[source] std::io::Error),
    /// The thread for names cannot be started.
    #[error("cannot start a thread for names of VMs")]
    Names(#[source] std::io::Error),
    /// The thread for forecasts cannot be started.
    #[error("cannot start a thread to measure VMs")]
    Forecasts(#[source] std::io::Error),
    /// The thread for the controller cannot be started.
    #[error("cannot start a thread for the controller")]
    Controller(#[source] std::io::Error),
    /// The host's boot id cannot be read.
    #[error("cannot read /proc/sys/kernel/random/boot_id")]
    BootId(#[source] std::io::Error),
}

/// A running agent. Dropping it ends its listeners; drivers end with the process, and the next agent resumes their
/// migrations.
#[derive(Debug)]
pub struct Agent {
    _serving: ListenerHandle,
    _api: Server,
}

impl Agent {
    /// Starts an agent: resumes the migrations of a previous one, then listens for peers and users. The injector calls
    /// [`tracee::injector_main`], the guard [`guard_main`](crate::guard_main).
    pub fn start(config: Config, injector: HelperProgram, guard: HelperProgram) -> Result<Self, StartError> {
        let endpoint = endpoint(&config)?;
        let journal = Journal::open(&config.state_dir, redact_secrets)?;
        let boot_id =
            std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(StartError::BootId)?;
        let registry = config.registry.as_ref().and_then(|witness| registry(&config, witness, &endpoint));
        let witness = match config.role {
            AgentRole::Witness => {
                Some(WitnessServer::new(Arc::new(SqliteRegistry::open(&config.state_dir)?)))
            }
            AgentRole::Host => None,
        };
        let listener = Listener::bind(endpoint.clone(), &config.listen.to_string())?;
        let socket = config.api_socket.clone();
        let router = Router::default();
        let context = Context {
            faults: Faults::new(config.fault_socket.clone()),
            injector: Arc::new(Injector::new(injector.program, injector.arguments)),
            guard,
            transport: MigrationTransport {
                connections: Arc::new(TcpTransport::new(endpoint.clone(), router.clone())),
                router,
            },
            arrivals: Arc::default(),
            names: NameLocks::default(),
            dns_keeper: DnsKeeper::load(&config),
            redirections: host::redirections::keeper(&config),
            emulators: EmulatorCache::default(),
            fixed_costs: Mutex::default(),
            templates: Templates::start(
                config.templates.clone(),
                config.state_dir.join("catalogues"),
                Duration::from_millis(config.timeouts.qemu_start_ms),
            )
            .map(Arc::new)
            .map_err(StartError::Templates)?,
            boot_id: boot_id.trim().to_owned(),
            journal,
            registry,
            config,
        };
        let daemon = Arc::new(Daemon::new(Arc::new(context), witness));
        host::end_probes(&daemon.context.config);
        host::preflight::end_measurements(&daemon.context.config.run_dir);
        host::redirections::resume(&daemon.context);
        daemon.resume_migrations()?;
        end_unused_redirections(&daemon.context).map_err(StartError::Redirections)?;
        dns_records::keep(&daemon.context).map_err(StartError::Names)?;
        forecasts::measure_regularly(&daemon).map_err(StartError::Forecasts)?;
        if let Some(controller) = daemon.context.config.controller.clone() {
            controller_link::start(&daemon, endpoint, controller).map_err(StartError::Controller)?;
        }
        let peers = Arc::clone(&daemon);
        let address = listener.address();
        let serving = listener.serve(move |arrival| peers.arrival(arrival))?;
        let api = api::serve(&socket, Arc::new(control::UserApi(daemon)))?;
        info!(%address, api = %socket.display(), "ready");
        Ok(Self { _serving: serving, _api: api })
    }
}

/// Ends redirections that nothing needs any more, as long as the agent runs.
fn end_unused_redirections(context: &Arc<Context>) -> std::io::Result<()> {
    let context = Arc::downgrade(context);
    let look = move || {
        let mut reaper = RedirectionReaper::default();
        while let Some(context) = context.upgrade() {
            reaper.look(&context);
            drop(context);
            std::thread::sleep(REDIRECTION_PAUSE);
        }
    };
    std::thread::Builder::new().name("redirections".to_owned()).spawn(look).map(drop)
}

/// Checks the files under `[tls]`, as far as this host can. Changes nothing.
pub fn check_identity(config: &Config) -> Result<(), StartError> {
    Ok(endpoint(config).map(drop)?)
}

fn endpoint(config: &Config) -> Result<Endpoint, IdentityError> {
    let security = match &config.security {
        Security::Plain => link::Security::Plain,
        Security::Tls { ca, certificate, key } => {
            let files = TlsFiles { ca: ca.clone(), certificate: certificate.clone(), key: key.clone() };
            let identity = Identity::load(&files)?;
            identity.check(&config.host)?;
            link::Security::Tls(identity)
        }
    };
    let settings = Settings {
        handshake: Duration::from_millis(config.timeouts.connect_ms),
        silence: Duration::from_millis(config.timeouts.peer_silence_ms),
        ..Settings::default()
    };
    Ok(Endpoint::new(config.host.clone(), security).with_settings(settings))
}

fn registry(config: &Config, witness: &proto::HostId, endpoint: &Endpoint) -> Option<Arc<dyn Registry>> {
    let address = config.peer(witness)?.to_owned();
    let peer = Peer { host: witness.clone(), address };
    let connect = Duration::from_millis(config.timeouts.connect_ms);
    let reply = Duration::from_millis(config.timeouts.peer_silence_ms);
    Some(Arc::new(WitnessClient::new(endpoint.clone(), peer, connect, reply)))
}

/// The agent behind its listeners.
pub(crate) struct Daemon {
    context: Arc<Context>,
    drivers: Mutex<BTreeMap<MigrationId, DriverHandle>>,
    /// Measurements of VMs for forecasts.
    measurements: Measurements,
    /// Present if this agent keeps the ownership registry.
    witness: Option<WitnessServer>,
    /// Connection to the controller, if one is configured.
    controller_link: ControllerLink,
}

/// A migration with a running driver.
pub(crate) struct DriverHandle {
    mailbox: DriverMailbox,
    publisher: Publisher,
    /// Present for a source only.
    controls: Option<Arc<source::MigrationControls>>,
}

/// Mailbox of a driver.
#[derive(Clone)]
pub(crate) enum DriverMailbox {
    Source(source::SourceMailbox),
    Destination(destination::DestinationMailbox),
}

impl Daemon {
    fn new(context: Arc<Context>, witness: Option<WitnessServer>) -> Self {
        Self {
            context,
            drivers: Mutex::default(),
            measurements: Measurements::default(),
            witness,
            controller_link: ControllerLink::default(),
        }
    }

    fn drivers(&self) -> MutexGuard<'_, BTreeMap<MigrationId, DriverHandle>> {
        self.drivers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mailbox(&self, id: &MigrationId) -> Option<DriverMailbox> {
        self.drivers().get(id).map(|driven| driven.mailbox.clone())
    }
}

#[cfg(test)]
mod tests;
