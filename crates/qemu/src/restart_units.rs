//! Units that would start a guest a second time after it has moved away: the systemd unit in which its QEMU
//! runs.

use std::collections::BTreeMap;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::find::QemuProcess;
use crate::process::is_systemd_running;

/// Values of `Restart` with which systemd starts a unit again when its QEMU is ended by SIGKILL.
const RESTARTS: &[&str] = &["always", "on-failure", "on-abnormal", "on-abort"];
/// Properties of a unit that name the units by which it is started.
const STARTED_BY: &[&str] = &["WantedBy", "RequiredBy", "UpheldBy", "BoundBy", "TriggeredBy"];

/// A way in which a guest would be started a second time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartRisk {
    /// Time at which it happens.
    pub when: RestartTime,
    /// Description of the finding.
    pub what: String,
    /// Advice.
    pub advice: String,
}

/// Time at which a guest would be started a second time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RestartTime {
    /// Immediately, when its QEMU ends on this host.
    AtOnce,
    /// At a boot of the host, or at another event for which the unit is started.
    AtBoot,
    /// Unknown, because the user's systemd does not answer.
    Unknown,
}

impl RestartTime {
    /// Returns the code of the finding.
    pub fn code(self) -> &'static str {
        match self {
            Self::AtOnce => "unit-restarts",
            Self::AtBoot => "unit-starts-at-boot",
            Self::Unknown => "unit-restart-unknown",
        }
    }
}

/// Returns the ways in which the unit of a process would start its guest a second time.
pub fn starts_again(process: &QemuProcess) -> Vec<RestartRisk> {
    let Some(unit) = process.unit.as_ref().filter(|_| is_systemd_running()) else { return Vec::new() };
    let mut command = Command::new("systemctl");
    if let Some(user) = process.unit_of_user {
        command.arg("--user").env("XDG_RUNTIME_DIR", format!("/run/user/{user}"));
    }
    let properties = format!("--property=Restart,UnitFileState,{}", STARTED_BY.join(","));
    let Ok(output) = command.args(["show", &properties, "--", unit]).output() else { return Vec::new() };
    let whose = process.unit_of_user.map_or(String::new(), |user| format!(" of user {user}"));
    if output.status.success() {
        return parse_unit(unit, &whose, &String::from_utf8_lossy(&output.stdout));
    }
    let unknown = process.unit_of_user.map(|_| RestartRisk {
        when: RestartTime::Unknown,
        what: format!("the systemd{whose} does not report whether unit {unit} would restart the guest"),
        advice: "make sure that the unit is disabled and has Restart=no".to_owned(),
    });
    unknown.into_iter().collect()
}

/// Parses the output of `systemctl show` for a unit.
fn parse_unit(unit: &str, whose: &str, shown: &str) -> Vec<RestartRisk> {
    let user = if whose.is_empty() { "" } else { " --user" };
    let properties: BTreeMap<&str, &str> = shown
        .lines()
        .filter_map(|line| line.split_once('='))
        .filter(|(_, value)| !value.is_empty())
        .collect();
    let mut found = Vec::new();
    if let Some(restart) = properties.get("Restart").filter(|restart| RESTARTS.contains(restart)) {
        found.push(RestartRisk {
            when: RestartTime::AtOnce,
            what: format!(
                "systemd unit {unit}{whose} has Restart={restart} and would restart the guest here after its \
                 migration"
            ),
            advice: format!("set Restart=no before the migration (`systemctl{user} edit {unit}`)"),
        });
    }
    let is_enabled = properties.get("UnitFileState").is_some_and(|state| state.starts_with("enabled"));
    let starters: Vec<_> =
        STARTED_BY.iter().filter_map(|name| Some(format!("{name}={}", properties.get(name)?))).collect();
    if is_enabled || !starters.is_empty() {
        let why = if is_enabled { "is enabled".to_owned() } else { format!("has {}", starters.join(", ")) };
        found.push(RestartRisk {
            when: RestartTime::AtBoot,
            what: format!(
                "systemd unit {unit}{whose} {why} and would start a second copy of the guest when this host boots"
            ),
            advice: format!(
                "disable it here before the migration (`systemctl{user} disable {unit}`), and enable it on \
                 the guest's new host"
            ),
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restart_risks_are_found() {
        let found = |shown: &str| -> Vec<RestartTime> {
            parse_unit("web.service", "", shown).into_iter().map(|found| found.when).collect()
        };
        let static_unit = "Restart=no\nUnitFileState=static\nWantedBy=\nRequiredBy=\nTriggeredBy=\n";
        assert_eq!(found(static_unit), []);
        assert_eq!(found("Restart=no\nUnitFileState=disabled\n"), []);
        // A SIGKILL is no success.
        assert_eq!(found("Restart=on-success\nUnitFileState=transient\n"), []);
        for restart in RESTARTS {
            assert_eq!(found(&format!("Restart={restart}\n")), [RestartTime::AtOnce]);
        }
        for state in ["enabled", "enabled-runtime"] {
            assert_eq!(found(&format!("Restart=no\nUnitFileState={state}\n")), [RestartTime::AtBoot]);
        }
        for started_by in STARTED_BY {
            assert_eq!(
                found(&format!("Restart=no\nUnitFileState=static\n{started_by}=x.target\n")),
                [RestartTime::AtBoot]
            );
        }
        assert_eq!(
            found("Restart=always\nUnitFileState=enabled\nWantedBy=x.target\n"),
            [RestartTime::AtOnce, RestartTime::AtBoot]
        );
        let of_user = parse_unit("web.service", " of user 7", "Restart=no\nUnitFileState=enabled\n");
        assert!(of_user[0].advice.contains("systemctl --user disable web.service"), "{of_user:?}");
    }
}
