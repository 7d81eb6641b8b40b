//! Zones of the configuration, with their keys.

use std::collections::BTreeMap;

use crate::config::{Server, ZoneConfig};
use crate::failure::Failure;
use crate::key_file;
use crate::name::Name;
use crate::tsig::Key;

/// Zones that may be changed, with their keys.
#[derive(Debug)]
pub struct Zones {
    configs: Vec<ZoneConfig>,
    keys: BTreeMap<Name, Result<Key, String>>,
}

/// One of the zones, ready for use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Zone<'a> {
    pub(crate) name: &'a Name,
    pub(crate) key: &'a Key,
    /// The primary server, which accepts updates.
    pub(crate) primary: Server,
    /// The secondary servers.
    pub(crate) secondaries: &'a [Server],
}

impl Zones {
    /// Reads the keys of zones. A key that cannot be used is reported when its zone is to be changed.
    pub fn load(configs: &[ZoneConfig]) -> Self {
        let load = |zone: &ZoneConfig| {
            let key = key_file::load(&zone.key_file, &zone.key_name, zone.algorithm);
            key.map_err(|error| match std::error::Error::source(&error) {
                Some(source) => format!("{error}: {source}"),
                None => error.to_string(),
            })
        };
        let keys = configs.iter().map(|zone| (zone.zone.clone(), load(zone))).collect();
        Self { configs: configs.to_vec(), keys }
    }

    /// Returns the zones whose keys cannot be used, each with the reason and advice.
    pub fn unusable(&self) -> impl Iterator<Item = (&Name, &str)> {
        self.keys.iter().filter_map(|(name, key)| Some((name, key.as_ref().err()?.as_str())))
    }

    /// Returns the configuration.
    pub fn configs(&self) -> &[ZoneConfig] {
        &self.configs
    }

    pub(crate) fn zone(&self, name: &Name) -> Result<Zone<'_>, Failure> {
        let missing = || Failure::NotConfigured { zone: name.clone() };
        let config = self.configs.iter().find(|zone| zone.zone == *name).ok_or_else(missing)?;
        let (primary, secondaries) = config.servers.split_first().ok_or_else(missing)?;
        let key = self.keys.get(name).ok_or_else(missing)?;
        let key = key.as_ref().map_err(|reason| Failure::KeyFile { reason: reason.clone() })?;
        Ok(Zone { name: &config.zone, key, primary: *primary, secondaries })
    }
}
