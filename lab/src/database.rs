//! A Debian guest with PostgreSQL, and a client that knows which of its transactions were committed.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};

use postgres::{Client, Config, NoTls};

use crate::debian_guest::server;
use crate::disk::overlay;
use crate::environment::{Environment, QemuVersion};
use crate::error::{Error, Result};
use crate::host::Host;
use crate::lab::Lab;
use crate::spec::GuestSpec;

const PORT: u16 = 5432;
/// Makes the table of rows, once.
const TABLE: &str =
    "create table if not exists rows (client int, n bigint, text text, primary key (client, n))";

/// Returns a guest with PostgreSQL on a root disk of its own, number `n` in the laboratory's network. With `fio` it
/// also writes and verifies a file continuously, and prints `VERIFIED` on its console after each time, or `FIO FAILED`.
pub fn database_guest(
    lab: &Lab,
    environment: &Environment,
    name: &str,
    n: u8,
    fio: bool,
) -> Result<GuestSpec> {
    let disk = lab.shared_directory()?.join(format!("{name}.qcow2"));
    overlay(&environment.qemu(QemuVersion::Installed)?, &disk, &environment.database_disk()?, "qcow2")?;
    server(environment, name, n, &disk, if fio { "guest.fio" } else { "" })
}

/// Returns the same guest with the root disk (qcow2) that it had before.
pub fn database_guest_again(environment: &Environment, name: &str, n: u8, disk: &Path) -> Result<GuestSpec> {
    server(environment, name, n, disk, "")
}

fn connect(host: &Host, address: Ipv4Addr) -> Result<Client> {
    let mut config = Config::new();
    config.host(&address.to_string()).port(PORT).user("postgres").dbname("postgres");
    host.within(|| config.connect(NoTls))?.map_err(|error| failed(&error))
}

fn failed(error: &postgres::Error) -> Error {
    let cause = std::error::Error::source(error).map_or_else(String::new, |cause| format!(": {cause}"));
    Error::Config(format!("PostgreSQL: {error}{cause}"))
}

/// Inserts a row.
fn insert(client: &mut Client, number: i32, row: u64) -> Result<u64, postgres::Error> {
    let text = format!("row {row} of client {number}");
    client.execute("insert into rows values ($1, $2, $3)", &[&number, &(row as i64), &text])
}

/// A client that commits one row after the other, over one connection that is never opened again.
#[derive(Debug)]
pub struct Committer {
    stop: Arc<AtomicBool>,
    /// Receives one item for each transaction whose commit was confirmed; disconnected when the connection ends.
    commits: Receiver<()>,
    thread: JoinHandle<(u64, Option<String>)>,
}

/// Result of a committer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitReport {
    /// Rows 0 to just before this one were confirmed.
    pub rows: u64,
    /// Error that ended its connection, if any.
    pub error: Option<String>,
}

impl Committer {
    /// Connects from `host`, and begins to commit rows of its own number.
    pub fn start(host: &Host, address: Ipv4Addr, number: i32) -> Result<Self> {
        let mut client = connect(host, address)?;
        client.batch_execute(TABLE).map_err(|error| failed(&error))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (tell, commits) = mpsc::channel();
        let work = move || {
            let mut rows = 0;
            while !stopped.load(Relaxed) {
                let done = insert(&mut client, number, rows);
                if let Err(error) = done {
                    return (rows, Some(failed(&error).to_string()));
                }
                rows += 1;
                // The receiver may be gone.
                let _ = tell.send(());
            }
            (rows, None)
        };
        Ok(Self { stop, commits, thread: thread::spawn(work) })
    }

    /// Waits for `commits` more commits. Fails if the connection breaks first.
    pub fn wait_for_commits(&self, commits: usize) -> Result<()> {
        // Earlier commits do not count.
        let _ = self.commits.try_iter().count();
        if self.commits.iter().take(commits).count() < commits {
            return Err(Error::Config("the client's connection broke".to_owned()));
        }
        Ok(())
    }

    /// Ends the committer and returns the confirmed commits.
    pub fn finish(self) -> CommitReport {
        self.stop.store(true, Relaxed);
        let (rows, error) = self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        CommitReport { rows, error }
    }
}

/// A client with a transaction that it leaves open.
pub struct OpenTransaction {
    client: Client,
    number: i32,
    /// Number of the transaction, by the database.
    id: String,
    rows: u64,
}

impl OpenTransaction {
    /// Connects from `host`, and begins a transaction with rows of its own number.
    pub fn begin(host: &Host, address: Ipv4Addr, number: i32) -> Result<Self> {
        let mut client = connect(host, address)?;
        let begun = client.batch_execute(TABLE).and_then(|()| client.batch_execute("begin"));
        let id = begun.and_then(|()| transaction(&mut client)).map_err(|error| failed(&error))?;
        Ok(Self { client, number, id, rows: 0 })
    }

    /// Inserts one more row.
    ///
    /// # Errors
    /// If the connection is broken, or the transaction is another one.
    pub fn insert(&mut self) -> Result<()> {
        let inserted = insert(&mut self.client, self.number, self.rows);
        let id = inserted.and_then(|_| transaction(&mut self.client)).map_err(|error| failed(&error))?;
        if id != self.id {
            return Err(Error::Config(format!("transaction {} has become {id}", self.id)));
        }
        self.rows += 1;
        Ok(())
    }

    /// Commits, and returns the number of its rows.
    pub fn commit(mut self) -> Result<u64> {
        self.client.batch_execute("commit").map_err(|error| failed(&error))?;
        Ok(self.rows)
    }
}

/// Returns the number of the present transaction.
fn transaction(client: &mut Client) -> Result<String, postgres::Error> {
    client.query_one("select pg_current_xact_id()::text", &[]).map(|row| row.get(0))
}

/// Returns a client's rows in the database, after all of its tables and their indices were found sound: PostgreSQL
/// compares the checksum of each page that it reads.
pub fn rows(host: &Host, address: Ipv4Addr, number: i32) -> Result<BTreeSet<u64>> {
    let mut client = connect(host, address)?;
    let read = (|| {
        client.batch_execute("create extension if not exists amcheck")?;
        client.query(
            "select bt_index_check(c.oid, i.indisunique) from pg_index i join pg_class c on c.oid = i.indexrelid \
             join pg_am m on m.oid = c.relam where m.amname = 'btree' and c.relpersistence = 'p' and i.indisvalid",
            &[],
        )?;
        client.query("select n, text from rows where client = $1", &[&number])
    })();
    let mut found = BTreeSet::new();
    for row in read.map_err(|error| failed(&error))? {
        let (n, text): (i64, String) = (row.get(0), row.get(1));
        if text != format!("row {n} of client {number}") {
            return Err(Error::Config(format!("row {n} of client {number} has the text {text:?}")));
        }
        found.insert(n as u64);
    }
    Ok(found)
}
