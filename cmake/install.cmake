# Where `make install` puts things. PREFIX is CMAKE_INSTALL_PREFIX; DESTDIR works as everywhere.
set(docdir_given ${CMAKE_INSTALL_DOCDIR})
include(GNUInstallDirs)
if(NOT docdir_given) # else it would be the library's name, while libexec has the command's
  set(CMAKE_INSTALL_DOCDIR ${CMAKE_INSTALL_DATAROOTDIR}/doc/dcp-attn)
endif()
install(TARGETS dcpattn dcpattn_static
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/include/dcpattn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
# Side by side as in the source, so that README's links lead somewhere.
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE ${CMAKE_SOURCE_DIR}/README.md ${CMAKE_SOURCE_DIR}/CONTRIBUTING.md
  DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR}
  FILES_MATCHING PATTERN "*.md" PATTERN "*.svg")
install(DIRECTORY ${CMAKE_SOURCE_DIR}/examples DESTINATION ${CMAKE_INSTALL_DOCDIR} FILES_MATCHING PATTERN "*.c")
if(TARGET dcp-attn)
  install(TARGETS dcp-attn RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(PROGRAMS ${CMAKE_SOURCE_DIR}/scripts/fetch-model.sh DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/dcp-attn)
endif()

# For pkg-config users; relative to its own place, so that any prefix at install time is right.
file(RELATIVE_PATH pc_to_prefix /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
file(WRITE ${CMAKE_BINARY_DIR}/dcpattn.pc
"prefix=\${pcfiledir}/${pc_to_prefix}
libdir=\${prefix}/${CMAKE_INSTALL_LIBDIR}
includedir=\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}

Name: dcpattn
Description: Exact attention over a KV cache that is sharded by token over ranks
Version: ${PROJECT_VERSION}
Libs: -L\${libdir} -ldcpattn
Libs.private: -lm -pthread
Cflags: -I\${includedir}
")
install(FILES ${CMAKE_BINARY_DIR}/dcpattn.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
# One for each MPI: dcpattn-openmpi, dcpattn-mpich. They say that MPI's own flags too, so that plain cc does.
foreach(name ${DCP_MPI_NAMES})
  set(module_cflags)
  foreach(dir ${DCP_MPI_INCLUDES_${name}})
    string(APPEND module_cflags " -I${dir}")
  endforeach()
  string(REPLACE ";" " " module_libs "${DCP_MPI_LDFLAGS_${name}}")
  file(WRITE ${CMAKE_BINARY_DIR}/dcpattn-${name}.pc
"prefix=\${pcfiledir}/${pc_to_prefix}
moduledir=\${prefix}/lib/dcpattn

Name: dcpattn-${name}
Description: Groups of dcpattn over an MPI communicator (${name})
Version: ${PROJECT_VERSION}
Requires: dcpattn = ${PROJECT_VERSION}
Libs: -L\${moduledir} -Wl,-rpath,\${moduledir} -ldcpattn_mpi_${name} ${module_libs}
Cflags:${module_cflags}
")
  install(FILES ${CMAKE_BINARY_DIR}/dcpattn-${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

# For find_package(dcpattn); relative to its own place, too.
include(CMakePackageConfigHelpers)
set(modules lib/dcpattn)
set(config_mpi)
foreach(name ${DCP_MPI_NAMES})
  string(APPEND config_mpi "dcpattn_mpi(${name} \"${DCP_MPI_INCLUDES_${name}}\" \"${DCP_MPI_LDFLAGS_${name}}\")\n")
endforeach()
configure_package_config_file(cmake/dcpattnConfig.cmake.in ${CMAKE_BINARY_DIR}/dcpattnConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/dcpattn
  PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR modules)
# Before 1.0 a minor version may change what programs are compiled against.
write_basic_package_version_file(${CMAKE_BINARY_DIR}/dcpattnConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/dcpattnConfig.cmake ${CMAKE_BINARY_DIR}/dcpattnConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/dcpattn)

# What `make` builds: all that is installed, none of the tests.
add_custom_target(product)
foreach(target dcpattn dcpattn_static dcp-attn dcpattn_mpi_openmpi dcpattn_mpi_mpich)
  if(TARGET ${target})
    add_dependencies(product ${target})
  endif()
endforeach()
